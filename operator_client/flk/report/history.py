"""Make telemetry of the lines of metrics in a log, for jobs whose launchers keep none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flk.jobs.logs import LogLine
from flk.observe.progress import Progress, read_progress
from flk_runtime.contract.telemetry import HISTORY_LIMIT, Sample, Telemetry

_UNKNOWN_TIME: Final = "1970-01-01T00:00:00Z"  # of lines that were archived without their times


def telemetry_of(lines: Iterable[LogLine]) -> Telemetry | None:
    """Return the measurements of the first rank that prints metrics, in the order of the lines; None without any."""
    samples: list[Sample] = []
    first: Progress | None = None
    total: int | None = None
    for line in lines:
        told = read_progress([f"{line.time or _UNKNOWN_TIME} [rank {line.rank or 0}] {line.message}"])
        if line.note or not told or (first is not None and told[0].rank != first.rank):
            continue
        first, total = first or told[0], told[0].total or total
        samples.append(_sample(told[0], line.attempt, samples[-1] if samples else None))
    if not samples:
        return None
    return Telemetry(samples[-1].time, samples[-1].attempt, total, history=thinned(samples))


def thinned(samples: list[Sample]) -> list[Sample]:
    """Return at most HISTORY_LIMIT of the samples, evenly chosen, the last one among them."""
    if len(samples) <= HISTORY_LIMIT:
        return samples
    last = len(samples) - 1
    return [samples[round(number * last / (HISTORY_LIMIT - 1))] for number in range(HISTORY_LIMIT)]


def _sample(told: Progress, attempt: int, before: Sample | None) -> Sample:
    seconds = None
    if before and told.step > before.step and told.time > before.time:
        seconds = (told.time - before.time) / (told.step - before.step)
    return Sample(
        time=told.time,
        attempt=attempt,
        step=told.step,
        loss=told.loss,
        samples_per_s=told.rate,
        mfu=told.mfu,
        communication=told.communication,
        data_wait=told.data_wait,
        step_seconds=seconds,
    )
