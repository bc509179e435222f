"""What this pod uses of its processors and memory, from its control group (v2) and /proc.

`Meter` is the thread of a launcher that reads it, and what the GPUs do, at intervals.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flk_runtime.contract.telemetry import GpuUsage, PodUsage
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host

INTERVAL: Final = 10.0  # seconds between two readings
_NAMED: Final = re.compile(r"^(\w+)[ \t]+(\d+)", re.MULTILINE)  # a line of cpu.stat and memory.stat


@dataclass(frozen=True)
class Counters:
    """Readings at one moment. Counters grow from the start of the container; None: it cannot be read here."""

    cpu_seconds: float | None = None
    cpu_limit: float | None = None  # processors that it may use
    memory: int | None = None  # bytes that count against the limit: without files that the kernel may drop
    memory_limit: int | None = None


def read(group: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Counters:
    """The readings of this container, which takes less than a millisecond."""
    used = _named(group / "cpu.stat").get("usage_usec")
    # Without it this is the root of the control groups: no container.
    seconds = _cpu_of_processes(proc) if used is None else used / 1e6
    memory = _memory(group)
    machine = _named(proc / "meminfo", separator=":")
    if memory is None and "MemAvailable" in machine:
        memory = (machine["MemTotal"] - machine["MemAvailable"]) << 10
    return Counters(
        seconds,
        host.cpu_limit(group) or float(host.cpu_count()),
        memory,
        host.memory_limit(group, proc / "meminfo") if "MemTotal" in machine else None,
    )


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

        first, last = before.cpu_seconds, counters.cpu_seconds
        known = first is not None and last is not None and now > since
        self.latest = PodUsage(
            self._settings.pod,
            self._settings.pod_name,
            self._settings.node,
            time=round(moment, 3),
            cpu=round(max(0.0, last - first) / (now - since), 3) if known else None,
            cpu_limit=counters.cpu_limit,
            memory=counters.memory,
            memory_limit=counters.memory_limit,
            gpus=gpus,
        )

    def _run(self) -> None:
        read_gpus = _open_gpus() if self._settings.gpus else list
        while True:
            self.measure(time.monotonic(), time.time(), read(), read_gpus())
            time.sleep(INTERVAL if self.latest and self.latest.cpu is not None else 1.0)


def _open_gpus() -> Callable[[], list[GpuUsage]]:
    from flk_runtime.launcher.telemetry.gpus import open_gpus  # not every job needs it

    return open_gpus()


def _cpu_of_processes(proc: Path) -> float | None:
    """Seconds of all processors of the machine that were not idle."""
    words = (_text(proc / "stat") or "").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") if len(ticks) >= 8 else None


def _memory(group: Path) -> int | None:
    """Bytes that count against the limit, without files that the kernel may drop."""
    count, dropped = _number(group / "memory.current"), _named(group / "memory.stat").get("inactive_file", 0)
    return None if count is None else max(0, count - dropped)


def _named(path: Path, separator: str = "") -> Mapping[str, int]:
    return {name: int(value) for name, value in _NAMED.findall((_text(path) or "").replace(separator or "\0", " "))}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None
