"""History: the samples of a job in the order of their steps, of which neighbours are merged when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from flk_runtime.contract.telemetry import HISTORY_LIMIT, Sample, overlaid

_KEPT: Final = ("time", "attempt", "step", "slowest_rank", "memory")
_MEASURED: Final = [field.name for field in fields(Sample) if field.name not in _KEPT]


class History:
    """At most ``limit`` samples. The latest one is never merged."""

    def __init__(self, limit: int = HISTORY_LIMIT, samples: Sequence[Sample] = ()) -> None:
        """Begin with ``samples`` of former launchers."""
        self._limit = limit
        self._merged: list[tuple[Sample, int]] = []  # each with the number of samples that it stands for
        self._per_entry = 1  # samples that one entry stands for at most
        self.latest: Sample | None = None
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """Add a sample. It replaces the samples of the same and of later steps: these are done again.

        Two samples of a step in the same attempt become one, with the values of both.
        """
        latest = self.latest
        if latest and sample.step == latest.step and sample.attempt == latest.attempt:
            self.latest = overlaid(latest, sample)
            return
        if latest and sample.step > latest.step:
            self._keep(latest)
        else:
            while self._merged and self._merged[-1][0].step >= sample.step:
                self._merged.pop()
        self.latest = sample

    def samples(self) -> list[Sample]:
        """All samples, the oldest first."""
        return [sample for sample, _ in self._merged] + ([self.latest] if self.latest else [])

    def _keep(self, sample: Sample) -> None:
        if self._merged and self._merged[-1][1] < self._per_entry and self._merged[-1][0].attempt == sample.attempt:
            self._merged[-1] = _mean(self._merged[-1], (sample, 1))
        else:
            self._merged.append((sample, 1))
        if len(self._merged) >= self._limit:
            self._merged = halved(self._merged)
            self._per_entry *= 2


def halved(entries: Sequence[tuple[Sample, int]]) -> list[tuple[Sample, int]]:
    """The entries with each pair of neighbours merged into one."""
    pairs = [_mean(*pair) for pair in zip(entries[::2], entries[1::2], strict=False)]
    return pairs + list(entries[len(pairs) * 2 :])


def _mean(former: tuple[Sample, int], later: tuple[Sample, int]) -> tuple[Sample, int]:
    """One entry for two, at the later step: the means of what was measured, the slower rank and the larger memory."""
    (first, few), (second, more) = former, later
    means: dict[str, float | None] = {}
    for name in _MEASURED:
        one, other = getattr(first, name), getattr(second, name)
        if one is None or other is None:
            means[name] = other if one is None else one
        else:
            means[name] = (one * few + other * more) / (few + more)
    slowest = max(first, second, key=lambda each: each.slowest_seconds or 0.0).slowest_rank
    memory = max(first.memory or 0.0, second.memory or 0.0) or None
    return Sample(second.time, second.attempt, second.step, slowest_rank=slowest, memory=memory, **means), few + more
