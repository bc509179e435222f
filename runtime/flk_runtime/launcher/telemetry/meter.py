"""Meter: the thread of a launcher that reads at intervals what its pod uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from flk_runtime.contract.telemetry import GpuUsage, PodUsage
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import usage
from flk_runtime.launcher.telemetry.usage import Counters

INTERVAL: Final = 10.0  # seconds between two readings


class Meter:
    """What this pod uses. The thread reads it, since a driver of GPUs that hangs must not stop the launcher."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._before: tuple[float, Counters] | None = None
        self.latest: PodUsage | None = None
        """The latest reading; None: there is none yet."""

    def start(self) -> None:
        """Start to read."""
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def measure(self, now: float, moment: float, counters: Counters, gpus: list[GpuUsage]) -> None:
        """Take a reading at ``now``, by a clock that only grows, and at ``moment`` in seconds since the epoch."""
        since, before = self._before or (now, counters)
        self._before = now, counters

        def rate(value: Callable[[Counters], float | None]) -> float | None:
            first, last = value(before), value(counters)
            if first is None or last is None or now <= since:
                return None
            return round(max(0.0, last - first) / (now - since), 3)

        self.latest = PodUsage(
            self._settings.pod,
            self._settings.pod_name,
            self._settings.node,
            time=round(moment, 3),
            cpu=rate(lambda each: each.cpu_seconds),
            cpu_limit=counters.cpu_limit,
            memory=counters.memory,
            memory_limit=counters.memory_limit,
            received=rate(lambda each: each.received),
            sent=rate(lambda each: each.sent),
            disk_read=rate(lambda each: each.disk_read),
            disk_written=rate(lambda each: each.disk_written),
            gpus=gpus,
        )

    def _run(self) -> None:
        read_gpus = _open_gpus() if self._settings.gpus else list
        while True:
            self.measure(time.monotonic(), time.time(), usage.read(), read_gpus())
            time.sleep(INTERVAL if self.latest and self.latest.cpu is not None else 1.0)


def _open_gpus() -> Callable[[], list[GpuUsage]]:
    from flk_runtime.launcher.telemetry.gpus import open_gpus  # not every job needs it

    return open_gpus()
