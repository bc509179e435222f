"""IdleGpus: since when no GPU of a job does anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from flk_runtime.contract.telemetry import PodUsage

BUSY: Final = 0.05  # share of the time in which a kernel ran, from which on a GPU does something


class IdleGpus:
    """Looks at the GPUs of all pods that take part in an attempt. Times are in seconds by the clock of the caller."""

    def __init__(self) -> None:
        self.since: float | None = None  # None: one does something, or those of a pod are not known
        self._pods: frozenset[int] = frozenset()
        self._busy: dict[int, float] = {}  # the busiest GPU of each pod

    def start_attempt(self, pods: Collection[int]) -> None:
        """Look at these pods from now on."""
        self._pods, self._busy, self.since = frozenset(pods), {}, None

    def add(self, pod: int, usage: PodUsage, now: float) -> None:
        """Add what a pod uses."""
        if usage.gpus:
            self._busy[pod] = max(gpu.busy for gpu in usage.gpus)
        else:
            self._busy.pop(pod, None)
        if self.unknown or max(self._busy.values(), default=1.0) >= BUSY:
            self.since = None
        elif self.since is None:
            self.since = now

    @property
    def unknown(self) -> list[int]:
        """The pods whose GPUs are not known."""
        return sorted(self._pods - self._busy.keys())
