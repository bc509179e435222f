"""Signs of progress of a rank, as its own launcher sees them and sends them to the leader."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from flk_runtime.contract.telemetry import PodUsage

_BUSY: Final = 0.05  # share of one CPU that a rank and its processes must use to count as busy
NEVER: Final = 1e9  # seconds since something that has not happened


class RankStatus(NamedTuple):
    """Signs of progress of one rank. Ages are in seconds."""

    rank: int
    step: int  # -1: unknown
    idle: float  # since the last step, heartbeat, line of output, or begin or end of a collective; at most its age
    beat: float  # since the last step or heartbeat
    cpu_idle: float  # since the rank and the processes that it started last used CPU time
    waits: float  # how long the rank has been in the same collective; 0: it is in none
    samples: int  # how often its observer has looked whether a collective is pending, since the rank started
    pending: int  # how often one was
    phase: str = "start"  # as in flk_runtime.launcher.hangs.phases
    step_seconds: float = 0.0  # mean of the latest steps; 0: unknown
    memory: int = 0  # resident MiB of its process; 0: unknown
    data_wait: float = -1.0  # share of the time in which it waited for batches; negative: unknown


@dataclass(frozen=True)
class PodStatus:
    """Signs of progress of the ranks of one pod in an attempt."""

    attempt: int
    ranks: list[RankStatus]
    usage: PodUsage | None = None  # once for each reading


class CpuMeter:
    """Notes when a process last used CPU time."""

    def __init__(self, now: float) -> None:
        self._time, self._seconds = now, 0.0
        self.busy_time = now

    def update(self, now: float, seconds: float) -> None:
        """``seconds`` is the CPU time so far of the process and of the processes that it started."""
        if now <= self._time:
            return
        if seconds - self._seconds >= _BUSY * (now - self._time):
            self.busy_time = now
        self._time, self._seconds = now, seconds


def age(moment: float, now: float | None = None) -> float:
    """Seconds since ``moment``, by time.monotonic; NEVER if it is 0."""
    return NEVER if not moment else max(0.0, (time.monotonic() if now is None else now) - moment)
