"""JSON that every parser reads: it has no NaN and no infinity, which Python's own writer leaves bare."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(data: Any, *, indent: int | None = 2) -> str:
    """Return data as JSON. A number that JSON cannot have is a string: "NaN", "Infinity" or "-Infinity"."""
    try:
        return json.dumps(data, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_told(data), indent=indent)


def _told(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {name: _told(each) for name, each in value.items()}
    return [_told(each) for each in value] if isinstance(value, list | tuple) else value
