"""IdleGpus: since when no GPU of a job does anything."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from flk_runtime.contract.telemetry import PodUsage

BUSY: Final = 0.05  # share of the time in which a kernel ran, from which on a GPU does something
_FRESH: Final = 120.0  # seconds for which a reading counts: where the driver hangs, the launcher tells no new one


class IdleGpus:
    """Looks at the GPUs of all pods that take part in an attempt. Times are in seconds by the clock of the caller."""

    def __init__(self) -> None:
        self._since: float | None = None  # None: one does something, or the GPUs of a pod are not known
        self._pods: frozenset[int] = frozenset()
        self._read: dict[int, tuple[float, float]] = {}  # of each pod: when it was told, and its busiest GPU

    def start_attempt(self, pods: Collection[int]) -> None:
        """Look at these pods from now on."""
        self._pods, self._read, self._since = frozenset(pods), {}, None

    def add(self, pod: int, usage: PodUsage, now: float) -> None:
        """Add what a pod uses."""
        if pod in self.unknown(now):
            self._since = None  # it may have been busy since its last reading
        if usage.gpus:
            self._read[pod] = now, max(gpu.busy for gpu in usage.gpus)
        else:
            self._read.pop(pod, None)
        if self.unknown(now) or max((busy for _, busy in self._read.values()), default=1.0) >= BUSY:
            self._since = None
        elif self._since is None:
            self._since = now

    def since(self, now: float) -> float | None:
        """Since when no GPU does anything; None: one does, or the GPUs of a pod are not known."""
        return None if self.unknown(now) else self._since

    def unknown(self, now: float) -> list[int]:
        """The pods whose GPUs are not known."""
        return sorted(pod for pod in self._pods if pod not in self._read or now - self._read[pod][0] > _FRESH)
