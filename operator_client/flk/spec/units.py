"""Quantities (``500m``, ``2Gi``) and times as Kubernetes and kubectl write them, and how durations are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from flk_runtime.contract.quantities import DURATION_UNITS

QUANTITY: Final = re.compile(
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
_FRACTION: Final = re.compile(r"\.[0-9]+")
_LARGEST: Final = Decimal(2**63 - 1)


def parse_quantity(text: str, form: str = "a quantity like 500m, 2 or 4Gi") -> Decimal:
    """Return the value of a quantity: ``500m`` is 0.5, ``2Gi`` is 2147483648.

    Raises ValueError for anything else, which says that it must be ``form``.
    """
    match = QUANTITY.fullmatch(text)
    if not match or len(text) > 40:
        raise ValueError(f"must be {form} (is {text!r})")
    suffix = match["suffix"]
    # "E" alone is exa; followed by digits it is an exponent.
    scale = Decimal(10) ** int(suffix[1:]) if suffix[-1:].isdigit() else _SCALES[suffix]
    value = Decimal(match["number"]) * scale
    if value > _LARGEST:
        raise ValueError(f"is larger than the largest quantity of Kubernetes, 2^63 - 1 (is {text!r})")
    return value


def cpu(text: str) -> str:
    """Return an amount of CPU unchanged. Raises ValueError unless it is a positive multiple of 0.001 cores."""
    value = parse_quantity(text, "a number of cores like 4, 0.5 or 500m")
    if value <= 0:
        raise ValueError(f"must be more than 0 (is {text!r})")
    if value * 1000 % 1:
        raise ValueError(f"must be a multiple of 1m, a thousandth of a core (is {text!r})")
    return text


LEAST_MEMORY: Final = 2**20  # bytes: with less, nothing starts, and gigabytes are meant


def memory(text: str) -> str:
    """Return an amount of memory unchanged. Raises ValueError unless it is a whole number of bytes of 1Mi or more."""
    value = parse_quantity(text, "a number of bytes like 512Mi or 16Gi")
    if value <= 0:
        raise ValueError(f"must be more than 0 (is {text!r})")
    if value % 1:
        raise ValueError(
            f"must be a whole number of bytes; 'm' means a thousandth, 'M' or 'Mi' a million (is {text!r})"
        )
    if value < LEAST_MEMORY:
        raise ValueError(f"must be at least 1Mi; without a unit it is a number of bytes (is {text!r})")
    return text


def bytes_text(value: float | None) -> str:
    """Return a number of bytes in the largest unit that it fills, with three digits: ``1.5Gi``; None is empty."""
    if value is None:
        return ""
    for unit, power in (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)):
        if value >= 1 << power:
            filled = value / (1 << power)
            return f"{filled:.0f}{unit}" if filled >= 1000 else f"{filled:.3g}{unit}"
    return f"{value:.0f}"


def duration_text(seconds: int) -> str:
    """Return a duration with its units: 5400 seconds are ``1h30m``."""
    parts = []
    for unit, length in DURATION_UNITS.items():
        amount, seconds = divmod(seconds, length)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def short_duration(seconds: float) -> str:
    """Return a duration in its two largest units, as kubectl writes an age: 75 is ``1m15s``, 90061 is ``1d1h``."""
    whole = max(0, int(seconds))
    coarse = 3600 if whole >= 86_400 else 60 if whole >= 3600 else 1
    return duration_text(whole - whole % coarse)


def time_text(seconds: float) -> str:
    """Return a time of less than some minutes with three digits: ``1.25 s``, ``12.3 ms``, ``150 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def number_text(value: float) -> str:
    """Return a number with three digits and k, M or G, or with four digits if it is less than 10,000."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.4g}"


def created_at(item: Mapping[str, Any]) -> float:
    """Return when an object of the Kubernetes API was created, in seconds since the epoch."""
    return timestamp(item["metadata"].get("creationTimestamp"))


def timestamp(text: object) -> float:
    """Return the seconds since the epoch of an RFC 3339 time of the Kubernetes API, or 0 for anything else."""
    # Python 3.10 takes no fraction but of 3 or 6 digits; a kubelet writes up to nine.
    whole = _FRACTION.sub(lambda found: f"{found[0]:0<7.7}", str(text).replace("Z", "+00:00"))
    try:
        return datetime.fromisoformat(whole).timestamp()
    except ValueError:
        return 0.0
