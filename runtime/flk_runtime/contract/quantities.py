"""Quantities in text: counts, sizes, durations, and sets of numbers with ranges.

Durations are as users write them: ``75s``, ``1h30m``, ``2d``, or a number of seconds. Sets are ``0-2,5`` for
programs and ``ranks 0-2, 5`` for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_MOST: Final = 10_000  # numbers in a text, which are those of the pods of a job
_SHOWN: Final = 8  # ranges in a text for people


def plural(count: int, noun: str) -> str:
    """The count with its noun: ``plural(2, "pod")`` is ``2 pods``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def often(times: int) -> str:
    """How many times something happened: ``twice``, ``3 times``."""
    return "twice" if times == 2 else plural(times, "time")


def size_text(size: float) -> str:
    """A number of bytes in the largest unit that it fills: ``1.5 GiB``."""
    for unit, power in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f}".removesuffix(".0") + f" {unit}"
    return plural(int(size), "byte")


def format_ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order: ``0-2,5``."""
    return ",".join(_texts(_ranges(numbers)))


def parse_ranges(text: str) -> list[int]:
    """The numbers that `format_ranges` has written. Raises ValueError for other text, and for more than 10,000."""
    numbers: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if not found or len(numbers) + len(found) > _MOST:
            raise ValueError("more numbers than expected, or a range without any")
        numbers += found
    return numbers


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """At least one number, with its noun, for people: ``rank 3``, ``ranks 0-3, 7``; a long list is cut."""
    ranges = _ranges(sorted(set(numbers)))
    left = sum(map(len, ranges[_SHOWN:]))
    shown = ", ".join(_texts(ranges[:_SHOWN])) + (f" and {left} more" if left else "")
    return f"{noun if sum(map(len, ranges)) == 1 else f'{noun}s'} {shown}"


def _ranges(numbers: Iterable[int]) -> list[range]:
    ranges: list[range] = []
    for number in numbers:
        if ranges and number == ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges


def _texts(ranges: Sequence[range]) -> list[str]:
    return [str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges]


DURATION_UNITS: Final = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}  # seconds, by their letter, the longest first
LONGEST: Final = 2**31 - 1  # seconds, 68 years
_N: Final = "[0-9]{1,9}"
_AFTER_H: Final = f"h(?:{_N}m)?(?:{_N}s)?"
DURATION: Final = f"[0-9]{{1,11}}|{_N}(?:d(?:{_N}h)?(?:{_N}m)?(?:{_N}s)?|{_AFTER_H}|m(?:{_N}s)?|s)"


def parse_duration(text: str) -> int:
    """Return the seconds in a duration. Raises ValueError."""
    if not re.fullmatch(DURATION, text):
        raise ValueError(f"must be a duration like 75s, 30m or 1h30m (is {text!r})")
    parts = re.findall("([0-9]+)([dhms]?)", text)
    seconds = sum(int(number) * DURATION_UNITS[unit or "s"] for number, unit in parts)
    if seconds > LONGEST:
        raise ValueError(f"is longer than 68 years (is {text!r})")
    return seconds
