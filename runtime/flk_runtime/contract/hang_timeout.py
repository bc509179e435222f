"""Hang timeouts: the text by which users limit how long a job may make no progress, in all phases or in single ones.

It is a duration, a list of phases with durations, or both: ``10m``, ``step=5m,save=20m``, ``10m,save=1h``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from flk_runtime.contract import durations
from flk_runtime.contract.phase import Phase

HANG_PHASES: Final = tuple(phase.value for phase in Phase)
ALL: Final = ""  # the key of the limit of all phases that have none of their own


def parse_hang_timeout(text: str) -> Mapping[str, float]:
    """Return the limits in seconds, by phase; ALL has the limit of the other phases. Raises ValueError."""
    found: dict[str, float] = {}
    for item in text.split(","):
        phase, equals, duration = item.rpartition("=")
        if equals and phase not in HANG_PHASES:
            raise ValueError(f"must name phases of {', '.join(HANG_PHASES)} (is {text!r})")
        if phase in found:
            raise ValueError(f"must have one duration for each phase (is {text!r})")
        found[phase] = _seconds(duration, text)
    return found


def _seconds(duration: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", duration):
        return float(duration)
    try:
        return durations.parse_duration(duration)
    except ValueError as error:
        raise ValueError(f"{error}, or have phases: step=5m,save=20m" if duration == text else str(error)) from None
