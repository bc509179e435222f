"""Quantities (``500m``, ``2Gi``), durations (``1h30m``) and times as Kubernetes and kubectl write them."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal
from typing import Final

_QUANTITY: Final = re.compile(
    r"\+?(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<suffix>[eE][+-]?[0-9]{1,3}|[KMGTPE]i|[numkMGTPE]?)", re.ASCII
)
_SCALES: Final = {
    "": Decimal(1),
    **{
        letter: Decimal(10) ** power
        for letter, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
    **{letter + "i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}
_LARGEST: Final = Decimal(2**63 - 1)
_DURATION: Final = re.compile(
    r"(?:(?P<days>[0-9]{1,9})d)?(?:(?P<hours>[0-9]{1,9})h)?(?:(?P<minutes>[0-9]{1,9})m)?(?:(?P<seconds>[0-9]{1,9})s)?",
    re.ASCII,
)
_UNITS: Final = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
LONGEST: Final = 2**31 - 1  # seconds, 68 years


def quantity(text: str) -> Decimal:
    """The value of a quantity: ``500m`` is 0.5, ``2Gi`` is 2147483648. ValueError for anything else."""
    match = _QUANTITY.fullmatch(text)
    if not match or len(text) > 40:
        raise ValueError(f"must be a quantity like 500m, 2 or 4Gi (is {text!r})")
    suffix = match["suffix"]
    # "E" alone is exa; followed by digits it is an exponent.
    scale = Decimal(10) ** int(suffix[1:]) if suffix[-1:].isdigit() else _SCALES[suffix]
    value = Decimal(match["number"]) * scale
    if value > _LARGEST:
        raise ValueError(f"is more than Kubernetes can count (is {text!r})")
    return value


def cpu(text: str) -> str:
    """An amount of CPU: positive, and not finer than a thousandth of a core, which is all that Kubernetes counts."""
    value = quantity(text)
    if value <= 0:
        raise ValueError(f"must be more than 0 (is {text!r})")
    if value * 1000 % 1:
        raise ValueError(f"must be whole thousandths of a core (is {text!r})")
    return text


def memory(text: str) -> str:
    """An amount of memory: a positive whole number of bytes."""
    value = quantity(text)
    if value <= 0:
        raise ValueError(f"must be more than 0 (is {text!r})")
    if value % 1:
        raise ValueError(f"must be whole bytes; 'm' is a thousandth, 'M' and 'Mi' are millions (is {text!r})")
    return text


def duration(text: str) -> int:
    """The seconds in a duration: ``75s``, ``1h30m``, ``2d``, or a number of seconds. ValueError for anything else."""
    if text.isascii() and text.isdigit() and len(text) < 12:
        seconds = int(text)
    else:
        match = _DURATION.fullmatch(text)
        if not match or not text:
            raise ValueError(f"must be a duration like 75s, 30m or 1h30m (is {text!r})")
        seconds = sum(int(amount) * _UNITS[unit] for unit, amount in match.groupdict().items() if amount)
    if seconds > LONGEST:
        raise ValueError(f"is longer than 68 years (is {text!r})")
    return seconds


def duration_text(seconds: int) -> str:
    """A duration as people write it: 5400 is ``1h30m``."""
    parts = []
    for unit, length in _UNITS.items():
        amount, seconds = divmod(seconds, length)
        if amount:
            parts.append(f"{amount}{unit[0]}")
    return "".join(parts) or "0s"


def short_duration(seconds: float) -> str:
    """A duration in its two largest units, as kubectl writes an age: 75 is ``1m15s``, 90061 is ``1d1h``."""
    whole = max(0, int(seconds))
    coarse = 3600 if whole >= 86_400 else 60 if whole >= 3600 else 1
    return duration_text(whole - whole % coarse)


def timestamp(text: object) -> float:
    """Seconds since the epoch of an RFC 3339 time in an object of the API; 0 if there is none."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
