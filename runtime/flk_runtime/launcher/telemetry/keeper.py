"""Keeper: the measurements of a job, which the launcher of pod 0 keeps over all attempts.

Its loop adds the lines of metrics that rank 0 prints, and the thread that leads adds what all launchers tell.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from flk_runtime.contract import log_format
from flk_runtime.contract.status import Ranks, RankStatus, of_all
from flk_runtime.contract.telemetry import (
    HISTORY_LIMIT,
    PODS_LIMIT,
    RANKS_LIMIT,
    PodStatus,
    PodUsage,
    Sample,
    Telemetry,
    overlaid,
)

_LOOK: Final = 10.0  # seconds between two looks at the steps of all ranks


class History:
    """The samples of a job in the order of their steps: at most ``limit`` of them, evenly over all steps."""

    def __init__(self, limit: int = HISTORY_LIMIT, samples: Sequence[Sample] = ()) -> None:
        """Begin with ``samples`` of former launchers."""
        self._limit = limit
        self._kept: list[Sample] = []  # before the latest one
        self._stride, self._count = 1, 0  # of so many samples one is kept; how many have come
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
            while self._kept and self._kept[-1].step >= sample.step:
                self._kept.pop()
        self.latest = sample

    def samples(self) -> list[Sample]:
        """All samples, the oldest first."""
        return [*self._kept, self.latest] if self.latest else []

    def _keep(self, sample: Sample) -> None:
        if self._count % self._stride == 0:
            self._kept.append(sample)
        self._count += 1
        if len(self._kept) >= self._limit:
            self._kept = self._kept[::2]
            self._stride *= 2


class Keeper:
    """The measurements of a job. All methods may be called from any thread, and return at once."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """``settings`` are what the job was set to; nothing of it is secret."""
        self._settings = dict(settings)
        self._lock = threading.Lock()
        self._attempt = 0
        self._total: int | None = None
        self._diverged: int | None = None
        self._history = History()
        self._pods: frozenset[int] = frozenset()  # of the attempt
        self._ranks: Ranks = {}
        self._usage: dict[int, PodUsage] = {}
        self._work: Mapping[int, float] = {}
        self._slow: Mapping[int, float] = {}
        self._of_all: dict[str, Any] = {}  # of all ranks and pods at the latest look, by the fields of Sample
        self._look_at = 0.0  # time of the next look, by time.monotonic
        self._sample_at = 0.0  # from when on a status becomes a sample: some time after the latest line of metrics

    def resume(self, former: Telemetry) -> None:
        """Go on after the measurements that former launchers have kept."""
        with self._lock:
            self._total = self._total or former.total_steps
            self._diverged = former.diverged if self._diverged is None else self._diverged
            self._history = History(samples=[*former.history, *self._history.samples()])

    def start_attempt(self, number: int, pods: Iterable[int]) -> None:
        """Note that an attempt starts on these pods."""
        with self._lock:
            self._attempt, self._pods = number, frozenset(pods)
            self._usage = {pod: usage for pod, usage in self._usage.items() if pod in self._pods}
            self._ranks = {}
            self._work, self._slow, self._of_all, self._look_at = {}, {}, {}, 0.0

    def add_line(self, line: bytes) -> None:
        """Add what a line of rank 0 says, if it is a line of metrics."""
        found = log_format.parse_metrics(line)
        if found is None:
            return
        with self._lock:
            self._total = found.total or self._total
            self._diverged = found.diverged(self._diverged)
            now = time.monotonic()
            self._look(now)
            self._sample_at = now + _LOOK
            sample = Sample(round(time.time(), 3), self._attempt, found.step, **found.finite(), **self._of_all)
            self._history.add(sample)

    def heartbeat(self, pod: int, status: PodStatus) -> None:
        """Add the status of a pod. That of pod 0 becomes a sample where its ranks print no metrics."""
        with self._lock:
            if status.usage:
                self._usage[pod] = status.usage
            if status.attempt != self._attempt or pod not in self._pods:
                return
            self._ranks[pod] = status.ranks
            step, now = max((rank.step for rank in status.ranks), default=-1), time.monotonic()
            if pod == 0 and now >= max(self._look_at, self._sample_at) and self._is_ahead(step):
                self._look(now)
                self._history.add(Sample(round(time.time(), 3), self._attempt, step, **self._of_all))

    def compare(self, work: Mapping[int, float], slow: Mapping[int, float]) -> None:
        """Note the share of the time in which each rank works, and the factors of those that the others wait for."""
        with self._lock:
            self._work, self._slow = work, slow

    def read(self) -> Telemetry:
        """The measurements until now."""
        with self._lock:
            # With what is known only by a comparison of all ranks.
            compared = (
                replace(status, work=self._work.get(status.rank), slow=self._slow.get(status.rank))
                for status in of_all(self._ranks)
            )
            ranks = sorted(compared, key=_worst)
            pods = dict.fromkeys([rank.pod for rank in ranks if rank.pod in self._usage])
            pods |= dict.fromkeys(sorted(self._usage))
            return Telemetry(
                round(time.time(), 3),
                self._attempt,
                self._total,
                self._history.samples(),
                ranks[:RANKS_LIMIT],
                [self._usage[pod] for pod in list(pods)[:PODS_LIMIT]],
                self._settings,
                self._diverged,
            )

    def _is_ahead(self, step: int) -> bool:
        latest = self._history.latest
        return step >= 0 and (latest is None or step > latest.step or latest.attempt != self._attempt)

    def _look(self, now: float) -> None:
        """Compute what a sample says of all ranks and pods, if the latest look is some time ago."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK
        seconds = {rank.rank: rank.step_seconds for rank in of_all(self._ranks) if rank.step_seconds}
        self._of_all = {}
        if memory := max((each.memory or 0 for each in self._usage.values()), default=0):
            self._of_all["memory"] = float(memory)
        if seconds:
            self._of_all["step_seconds"] = statistics.median_low(seconds.values())
        works = {rank: share * seconds[rank] for rank, share in self._work.items() if rank in seconds}
        if works:
            slowest = max(works, key=lambda rank: works[rank])
            self._of_all |= {"slowest_rank": slowest, "slowest_seconds": round(works[slowest], 6)}


def _worst(rank: RankStatus) -> tuple[float, float, int, float, int]:
    """A key that sorts ranks: those that the others wait for first, then those that work longest or are behind."""
    return -(rank.slow or 0.0), -(rank.work or 0.0), rank.step, -(rank.step_seconds or 0.0), rank.rank
