"""The page of the chart's values, from their schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from scripts.chart.values import described


def page(table: Callable[[Sequence[str], Sequence[tuple[str, ...]]], str]) -> str:
    """The page as Markdown; ``table`` writes a table from its head and its rows."""
    rows = []
    for path, value in described():
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        rows.append((f"`{path}`", default, value["description"]))
    return (
        "# Values of the chart\n\nThe Helm chart `charts/flk` refuses values that are not in this table. "
        "The [guide](../guides/helm.md) shows how to use it.\n\n" + table(["value", "default", "meaning"], rows)
    )
