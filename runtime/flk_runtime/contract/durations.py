"""Durations as users write them: ``75s``, ``1h30m``, ``2d``, or a number of seconds."""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}  # seconds, by their letter, the longest first
LONGEST: Final = 2**31 - 1  # seconds, 68 years
_N: Final = "[0-9]{1,9}"
_AFTER_H: Final = f"h(?:{_N}m)?(?:{_N}s)?"
PATTERN: Final = f"[0-9]{{1,11}}|{_N}(?:d(?:{_N}h)?(?:{_N}m)?(?:{_N}s)?|{_AFTER_H}|m(?:{_N}s)?|s)"


def parse_duration(text: str) -> int:
    """Return the seconds in a duration. Raises ValueError."""
    if not re.fullmatch(PATTERN, text):
        raise ValueError(f"must be a duration like 75s, 30m or 1h30m (is {text!r})")
    parts = re.findall("([0-9]+)([dhms]?)", text)
    seconds = sum(int(number) * UNITS[unit or "s"] for number, unit in parts)
    if seconds > LONGEST:
        raise ValueError(f"is longer than 68 years (is {text!r})")
    return seconds
