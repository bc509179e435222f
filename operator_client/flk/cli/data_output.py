"""DataOutput: the formats of `-o` that print data: json, yaml, jsonpath and custom-columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flk.cli.json_text import json_text
from flk.cli.jsonpath import Part, Step, parse_path, parse_template, split_commas, text_of
from flk.errors import UsageError

WORDS: Final = ("text", "wide", "json", "yaml", "name")
TEMPLATES: Final = ("jsonpath=TEMPLATE", "custom-columns=HEADER:PATH,…")


@dataclass(frozen=True)
class DataOutput:
    """One format. ``kind`` is its name; ``is_data`` says whether `text` can print it."""

    kind: str
    template: Part | None = None
    columns: Sequence[tuple[str, Step]] = ()

    @classmethod
    def parse(cls, value: str, *, raw: bool = False, watch: bool = False) -> DataOutput:
        """Return the format that `-o` names: one of WORDS, or one with a template.

        Raises UsageError for any other, with ``raw`` for one that prints no data, and with ``watch`` for one that
        cannot be printed again at each change.
        """
        form = cls._parsed(value)
        if raw and not form.is_data:
            raise UsageError("--raw: needs -o json, yaml, jsonpath=… or custom-columns=…")
        if watch and (raw or form.kind not in ("text", "wide", "json")):
            raise UsageError(f"--watch and {'--raw' if raw else f'--output {form.kind}'} exclude each other")
        return form

    @classmethod
    def _parsed(cls, value: str) -> DataOutput:
        kind, equals, rest = value.partition("=")
        try:
            if equals and kind == "jsonpath":
                return cls(kind, parse_template(rest))
            if equals and kind == "custom-columns":
                return cls(kind, columns=_columns(rest))
        except ValueError as error:
            raise UsageError(f"--output: {kind}: {error}") from None
        if value not in WORDS:
            *first, last = [*WORDS, *TEMPLATES]
            raise UsageError(f"--output: must be {', '.join(first)} or {last} (is {value!r})")
        return cls(value)

    @property
    def is_data(self) -> bool:
        """Whether it prints plain data: all but text, wide and name."""
        return self.kind in ("json", "yaml", "jsonpath", "custom-columns")

    def text(self, data: Any) -> str:
        """Return plain data in this format. Rows of columns are the ``items`` of the data, or the data itself."""
        if self.kind == "json":
            return json_text(data) + "\n"
        plain = json.loads(json_text(data))
        if self.template is not None:
            return self.template(plain)
        if self.columns:
            from flk.cli.table import table

            rows = plain["items"] if isinstance(plain.get("items"), list) else [plain]
            cells = [[_cell(path(row)) for _, path in self.columns] for row in rows]
            return "".join(line + "\n" for line in table([header for header, _ in self.columns], cells))
        import yaml

        return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def data_of(items: list[dict[str, Any]], raw: bool) -> dict[str, Any]:
    """Return the data of several jobs: their states, or (``raw``) their objects in a list of the API."""
    from flk.jobs.state import SCHEMA

    return {"apiVersion": "v1", "kind": "List", "items": items} if raw else {"schema": SCHEMA, "items": items}


def raw_object(job: dict[str, Any]) -> dict[str, Any]:
    """Return an object of the API as kubectl shows it: without the field managedFields."""
    return {**job, "metadata": {key: value for key, value in job["metadata"].items() if key != "managedFields"}}


def _columns(text: str) -> list[tuple[str, Step]]:
    columns = []
    for part in split_commas(text):
        header, colon, path = part.partition(":")
        if not (header.strip() and colon and path.strip()):
            raise ValueError(f"must be HEADER:PATH,…, as in NAME:.name,PHASE:.phase (has {part!r})")
        columns.append((header.strip(), parse_path(path)))
    return columns


def _cell(values: Sequence[Any]) -> str:
    """Return the values of a cell, as kubectl prints them."""
    return " ".join(",".join(map(text_of, values)).split()) or "<none>"
