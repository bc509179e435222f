"""Progress: how far a rank is, from the lines of metrics that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flk.units import timestamp

_METRICS: Final = re.compile(r"(?P<time>[-\dT:]+(?:\.\d{1,6})?)\d*Z (?:\[rank (?P<rank>\d+)\] )?(?P<json>\{.*\})\s*")
_TOTALS: Final = ("total", "total_steps", "steps", "max_steps")  # keys with the number of steps of the whole job


@dataclass(frozen=True)
class Progress:
    """The last line of metrics of one rank. Times are in seconds."""

    rank: int
    step: int
    time: float  # since the epoch
    total: int | None = None  # steps of the whole job, if the line says so
    step_time: float | None = None  # mean since the line of metrics before
    loss: float | None = None
    rate: float | None = None  # samples per second, of all ranks together
    mfu: float | None = None  # model FLOPs utilisation, from 0 to 1, as the shares
    communication: float | None = None  # share of the time in which a collective was under way
    data_wait: float | None = None  # share of the time in which the rank waited for data

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step at this speed; None if unknown."""
        if self.total is None or self.step_time is None:
            return None
        return max(0, self.total - self.step) * self.step_time


def read_progress(lines: Sequence[str]) -> list[Progress]:
    """Return the progress of the ranks whose metrics are among lines of a log, each of which begins with its time.

    A line of metrics is an object of JSON with a whole number ``step``, as `flk_runtime.Run` and many scripts print it.
    """
    last: dict[int, Progress] = {}
    for line in lines:
        match = _METRICS.fullmatch(line.rstrip())
        values = _object(match["json"]) if match else None
        step = values.get("step") if values else None
        if match is None or values is None or not isinstance(step, int) or isinstance(step, bool):
            continue
        rank, time = int(match["rank"] or 0), timestamp(match["time"] + "Z")
        before = last.get(rank)
        step_time = before.step_time if before else None
        if before and step > before.step and time > before.time:
            step_time = (time - before.time) / (step - before.step)
        known = before.total if before else None  # another line of the rank may say it
        total = next((values[key] for key in _TOTALS if isinstance(values.get(key), int)), known)
        measured = (_number(values.get(key)) for key in ("loss", "samples_per_s", "mfu", "comm", "data_wait"))
        last[rank] = Progress(rank, step, time, total, step_time, *measured)
    return [last[rank] for rank in sorted(last)]


def _object(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
