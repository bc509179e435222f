"""What this pod uses of its processors, memory, networks and disks, from its control group (v2 or v1) and /proc."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flk_runtime.system import host

_NAMED: Final = re.compile(r"^(\w+)[ \t]+(\d+)", re.MULTILINE)  # a line of cpu.stat and memory.stat


@dataclass(frozen=True)
class Counters:
    """Readings at one moment. Counters grow from the start of the container; None: it cannot be read here."""

    cpu_seconds: float | None = None
    cpu_limit: float | None = None  # processors that it may use
    memory: int | None = None  # bytes that count against the limit: without files that the kernel may drop
    memory_limit: int | None = None
    received: int | None = None  # bytes, as the following
    sent: int | None = None
    disk_read: int | None = None
    disk_written: int | None = None


def read(group: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Counters:
    """The readings of this container, which takes less than a millisecond."""
    v2 = (group / "cgroup.controllers").exists()
    seconds = _cpu_v2(group) if v2 else _cpu_v1(group)
    if seconds is None:  # the root of the control groups: no container
        seconds = _cpu_of_processes(proc)
    of_group = (group, "memory.current", "") if v2 else (group / "memory", "memory.usage_in_bytes", "total_")
    memory = _memory(*of_group)
    machine = _named(proc / "meminfo", separator=":")
    if memory is None and "MemAvailable" in machine:
        memory = (machine["MemTotal"] - machine["MemAvailable"]) << 10
    io = (group / "io.stat", "rbytes=", "wbytes=") if v2 else (group / "blkio" / _BLKIO, "Read ", "Write ")
    read_bytes, written = _disk(*io)
    received, sent = _network(proc / "net" / "dev")
    return Counters(
        seconds,
        host.cpu_limit(group) or float(host.cpu_count()),
        memory,
        host.memory_limit(group, proc / "meminfo") if "MemTotal" in machine else None,
        received,
        sent,
        read_bytes,
        written,
    )


_BLKIO: Final = "blkio.throttle.io_service_bytes"


def _cpu_v2(group: Path) -> float | None:
    used = _named(group / "cpu.stat").get("usage_usec")
    return None if used is None else used / 1e6


def _cpu_v1(group: Path) -> float | None:
    used = _number(group / "cpuacct" / "cpuacct.usage")
    return None if used is None else used / 1e9


def _cpu_of_processes(proc: Path) -> float | None:
    """Seconds of all processors of the machine that were not idle."""
    words = (_text(proc / "stat") or "").partition("\n")[0].split()[1:]
    ticks = [int(word) for word in words]
    return (sum(ticks[:8]) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") if len(ticks) >= 8 else None


def _memory(folder: Path, used: str, prefix: str) -> int | None:
    """Bytes that count against the limit, without files that the kernel may drop."""
    count, dropped = _number(folder / used), _named(folder / "memory.stat").get(f"{prefix}inactive_file", 0)
    return None if count is None else max(0, count - dropped)


def _disk(path: Path, *keys: str) -> tuple[int | None, int | None]:
    """The sums over all disks of what follows the two keys: bytes that were read and written."""
    text = _text(path)
    if text is None:
        return None, None
    read_bytes, written = ([int(each) for each in re.findall(rf"\b{key}(\d+)", text)] for key in keys)
    return sum(read_bytes), sum(written)


def _network(path: Path) -> tuple[int | None, int | None]:
    """Bytes that all interfaces but the loopback have received and sent."""
    found = list(_interfaces(_text(path) or ""))
    return (sum(each[0] for each in found), sum(each[1] for each in found)) if found else (None, None)


def _interfaces(text: str) -> Iterator[tuple[int, int]]:
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if name.strip() != "lo" and len(words) >= 9:
            yield int(words[0]), int(words[8])


def _named(path: Path, separator: str = "") -> Mapping[str, int]:
    return {name: int(value) for name, value in _NAMED.findall((_text(path) or "").replace(separator or "\0", " "))}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None
