"""The layout of JSON in the generated files of the chart."""

from __future__ import annotations

import json
from typing import Any, Final

WIDTH: Final = 120  # columns


def compact_json(value: Any, indent: str = "") -> str:
    """JSON in which every part that fits stands on one line, and so does every list of numbers."""
    line = json.dumps(value, ensure_ascii=False)
    numbers = isinstance(value, list) and all(isinstance(item, int) for item in value)
    if len(indent) + len(line) <= WIDTH or numbers or not isinstance(value, dict | list) or not value:
        return line
    more = f"{indent}  "
    if isinstance(value, list):
        items, ends = [compact_json(item, more) for item in value], "[]"
    else:
        items, ends = [f"{json.dumps(key)}: {compact_json(item, more)}" for key, item in value.items()], "{}"
    return f"{ends[0]}\n" + ",\n".join(more + item for item in items) + f"\n{indent}{ends[1]}"
