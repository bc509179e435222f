"""What commands print on stdout: JSON and YAML that every parser reads, and tables in aligned columns."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Sequence
from typing import Any


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """Return data as JSON. A number that JSON cannot have is a string: "NaN", "Infinity" or "-Infinity"."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(data), indent=indent)


def data_text(data: Any, form: str) -> str:
    """Return data as text that ends with a line end. ``form`` is json or yaml."""
    text = json_text(data)
    if form == "json":
        return f"{text}\n"
    import yaml

    return str(yaml.safe_dump(json.loads(text), sort_keys=False, allow_unicode=True))


def items_text(items: list[dict[str, Any]], form: str) -> str:
    """Return the data of several jobs' states as text. ``form`` is json or yaml."""
    from flk.jobs.state import SCHEMA

    return data_text({"schema": SCHEMA, "items": items}, form)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, without: Container[str] = (), width: int = 0
) -> list[str]:
    """Return lines whose columns are as wide as their widest cell, as kubectl's. An empty cell becomes ``-``.

    Columns whose titles are among ``without`` are left out. Where the table is wider than ``width`` (0: no limit), the
    last cell of a row stands below it: it says why.
    """
    cells = [list(header), *([cell or "-" for cell in row] for row in rows)]
    shown = [column for column, title in enumerate(header) if title not in without]
    if width and sum(max(len(row[column]) for row in cells) + 3 for column in shown) - 3 > width:
        without = {title for title in header if title in without} | {header[shown[-1]]}
        lines = table(header, rows, without=without)
        last = [row[shown[-1]] for row in rows]
        below = (["  " + cell] if cell else [] for cell in last)
        return [lines[0], *(part for line, why in zip(lines[1:], below, strict=True) for part in (line, *why))]
    widths = {column: max(len(row[column]) for row in cells) for column in shown}
    return ["   ".join(row[column].ljust(width) for column, width in widths.items()).rstrip() for row in cells]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
