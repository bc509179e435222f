"""The page of the chart's values, from the descriptions in its schema and the defaults in values.yaml."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import yaml

from scripts.documentation.pages import ROOT

CHART: Final = ROOT / "charts" / "flk"


def described() -> Iterator[tuple[str, str]]:
    """Every value that the schema describes: its path and its description."""
    return _described(json.loads((CHART / "values.schema.json").read_text()), "")


def _described(schema: dict[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for name, value in schema.get("properties", {}).items():
        if "description" in value:
            yield above + name, value["description"]
        yield from _described(value, f"{above}{name}.")


def page(table: Callable[[Sequence[str], Sequence[tuple[str, ...]]], str]) -> str:
    """The page as Markdown; ``table`` writes a table from its head and its rows."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = []
    for path, text in described():
        default: Any = values
        for name in path.split("."):
            default = default[name]
        rows.append((f"`{path}`", "" if isinstance(default, dict) and default else f"`{json.dumps(default)}`", text))
    return (
        "# Values of the chart\n\nThe Helm chart `charts/flk` refuses values that are not in this table. "
        "The [guide](../guides/helm.md) shows how to use it.\n\n" + table(["value", "default", "meaning"], rows)
    )
