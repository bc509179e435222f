"""Progress: how far a rank is, from the lines of metrics that it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flk.spec.units import timestamp
from flk_runtime.contract import log_format
from flk_runtime.contract.telemetry import HISTORY_LIMIT, Sample, Telemetry, overlaid, thinned
from flk_runtime.contract.values import dataclass

STAMP: Final = re.compile(rb"((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)) ")
_METRICS: Final = re.compile(STAMP.pattern.decode() + r"(?:\[rank (?P<rank>\d{1,9})\] )?(?P<json>\{.*\})\s*")


@dataclass(frozen=True)
class Progress(log_format.Measured):
    """The last line of metrics of one rank. Times are in seconds."""

    rank: int
    step: int
    time: float  # since the epoch
    total: int | None = None  # steps of the whole job, if the line says so
    step_time: float | None = None  # mean since the line of metrics before

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step at this speed; None if unknown."""
        if self.total is None or not self.step_time:  # 0.0: too short to tell
            return None
        return max(0, self.total - self.step) * self.step_time


def read_progress(lines: Sequence[str]) -> list[Progress]:
    """Return the progress of the ranks whose metrics are among lines of a log, each of which begins with its time.

    A line of metrics is as `flk_runtime.contract.log_format` says.
    """
    last: dict[int, Progress] = {}
    for line in lines:
        read = _read(line)
        if read is None:
            continue
        time, rank, found = read
        before = last.get(rank)
        step_time = before.step_time if before else None
        if before and found.step > before.step and time > before.time:
            step_time = (time - before.time) / (found.step - before.step)
        total = before.total if before and found.total is None else found.total  # another line may say it
        progress = Progress(rank, found.step, time, total, step_time, **found.measured())
        last[rank] = overlaid(before, progress) if before and before.step == progress.step else progress
    return [last[rank] for rank in sorted(last)]


def read_telemetry_of(lines: Sequence[str], now: float) -> Telemetry:
    """Return what the lines of metrics of rank 0 say. The lines are as in `read_progress`.

    Steps that were done again stand once. Two lines of a step become one sample, with the values of both.
    """
    by_step: dict[int, Sample] = {}
    total = diverged = None
    for line in lines:
        read = _read(line)
        if read is None or read[1] != 0:
            continue
        time, _, found = read
        total = found.total if found.total is not None else total
        diverged = found.diverged(diverged)
        while by_step and next(reversed(by_step)) > found.step:
            by_step.popitem()
        sample = Sample(time, 0, found.step, **found.finite())
        by_step[found.step] = overlaid(by_step[found.step], sample) if found.step in by_step else sample
    return Telemetry(now, 0, total, thinned(list(by_step.values()), HISTORY_LIMIT), diverged=diverged)


def _read(line: str) -> tuple[float, int, log_format.MetricsLine] | None:
    """Return the time in seconds since the epoch, the rank and the metrics of a line of a log; None without metrics."""
    match = _METRICS.fullmatch(line.rstrip())
    found = log_format.parse_metrics(match["json"]) if match else None
    return (timestamp(match[1]), int(match["rank"] or 0), found) if match and found else None


def split_stamp(line: bytes) -> tuple[str, str]:
    """Return the time stamp and the text of a line of a log; the first is empty for a message of the kubelet."""
    match = STAMP.match(line)
    if match is None:
        return "", line.decode(errors="replace")
    return match[1].decode(), line[match.end() :].decode(errors="replace")
