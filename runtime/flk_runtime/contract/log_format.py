"""Format of the pods' logs: the prefixes of lines, the lines that are for programs, and lines of metrics.

A line of metrics is an object of JSON with a whole number ``step``, as `flk_runtime.Run` and many scripts print it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import KW_ONLY
from typing import Any, Final

from flk_runtime.contract import foreign
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.values import dataclass, fields

LAUNCHER_PREFIX: Final = "[pod {index}] "
RANK_PREFIX: Final = "[rank {rank}] "
RECORD_MARKER: Final = "flk-record "  # between the launcher's prefix and a JobRecord as JSON, for `flk status`
ATTEMPT_MARKER: Final = "flk-attempt "  # between the launcher's prefix and the number of the attempt, from 1
TELEMETRY_MARKER: Final = "flk-telemetry "  # between the launcher's prefix and the packed telemetry, at the end
BENCH_MARKER: Final = "flk-bench "  # between the prefix of rank 0 and the result of `flk bench` as JSON
RECORD_INTERVAL: Final = 1000  # lines after which the launcher of pod 0 repeats the record, so that a tail contains it
_RECORD_LINE = re.compile(r"^\[pod \d+\] " + re.escape(RECORD_MARKER))
_TELEMETRY_LINE = re.compile(r"^\[pod \d+\] " + re.escape(TELEMETRY_MARKER))
_ATTEMPT_LINE = re.compile(r"^\[pod \d+\] " + re.escape(ATTEMPT_MARKER) + r"(\d{1,9})$")


def parse_record(line: str) -> JobRecord | None:
    """The job record that a line of a pod's log contains, or None."""
    match = _RECORD_LINE.match(line)
    return JobRecord.from_json(line[match.end() :]) if match else None


def parse_attempt(line: str) -> int | None:
    """The number, from 1, of the attempt that begins with a line of a pod's log; None for other lines."""
    match = _ATTEMPT_LINE.match(line)
    return int(match[1]) if match else None


def parse_telemetry(line: str) -> str:
    """The telemetry, as `telemetry.pack_telemetry` writes it, that a line of a pod's log contains; empty for others."""
    match = _TELEMETRY_LINE.match(line)
    return line[match.end() :] if match else ""


def is_record(line: str) -> bool:
    """Return whether a line of a pod's log is for programs: a job record, telemetry or the mark of an attempt."""
    return any(pattern.match(line) for pattern in (_RECORD_LINE, _ATTEMPT_LINE, _TELEMETRY_LINE))


TOTAL_NAMES: Final = ("total", "total_steps", "steps", "max_steps")  # keys with the number of steps of the whole job
_NOT_FINITE: Final = ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity")  # as strings: JSON has no such numbers
_LARGEST_COUNT: Final = 1 << 53  # a larger number is no count of steps


@dataclass(frozen=True)
class Measured:
    """What a rank measures around one step and prints. A value that it does not measure is None."""

    _: KW_ONLY  # so that the fields of other classes come first
    loss: float | None = None
    samples_per_s: float | None = None  # of all ranks together
    tokens_per_s: float | None = None
    mfu: float | None = None  # model FLOPs utilisation, from 0 to 1, as the shares
    communication: float | None = None  # share of the time in which a collective was under way
    data_wait: float | None = None  # share of the time in which the rank waited for data

    def measured(self) -> dict[str, Any]:
        """The values by the names of their fields, for another kind of what was measured."""
        return {each.name: getattr(self, each.name) for each in fields(Measured)}


@dataclass(frozen=True)
class MetricsLine(Measured):
    """What one line of metrics says."""

    step: int
    total: int | None = None  # steps of the whole job

    def finite(self) -> dict[str, Any]:
        """The values as in `measured` that are finite numbers."""
        return {name: value for name, value in self.measured().items() if value is not None and math.isfinite(value)}

    def diverged(self, before: int | None) -> int | None:
        """The step since which the loss is infinite or no number. ``before`` is that after the line before."""
        if self.loss is None:
            return before
        return None if math.isfinite(self.loss) else self.step if before is None else before


def parse_metrics(line: str | bytes) -> MetricsLine | None:
    """The metrics of a line without a prefix; None if it has none."""
    start, key = ("{", '"step"') if isinstance(line, str) else (b"{", b'"step"')
    if not line.startswith(start) or key not in line:  # type: ignore[arg-type,operator]  # both are of one type
        return None
    try:
        values = json.loads(line)
    except foreign.ERRORS:  # not by foreign.parse: Python writes a loss of NaN as it stands
        return None
    step = _count(values.get("step"))
    if step is None:
        return None
    total = next((count for name in TOTAL_NAMES if (count := _count(values.get(name))) is not None), None)
    values["communication"] = values.get("comm")  # as lines of metrics name it
    return MetricsLine(step, total, **{each.name: _number(values.get(each.name)) for each in fields(Measured)})


def _count(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < _LARGEST_COUNT else None


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    return float(value) if type(value) is float or (type(value) is int and abs(value) < _LARGEST_COUNT) else None
