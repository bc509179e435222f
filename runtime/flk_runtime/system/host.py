"""What the machine or the container says of itself: processors, memory kills, network interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import signal
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915
_LISTEN = "0A"  # a socket's state in /proc/net/tcp


def processors(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors that this container may use: its affinity, or its CPU limit rounded up where that is less."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000" or "150000 100000"
        quota, period = (root / "cpu.max").read_text().split()
        return min(count, max(1, math.ceil(int(quota) / int(period))))
    with contextlib.suppress(OSError, ValueError):  # cgroup v1: -1 means no limit
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        if quota_us > 0:
            return min(count, max(1, math.ceil(quota_us / period_us)))
    return count


def gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """GPUs of NVIDIA's that this container may use, without importing torch: CUDA_VISIBLE_DEVICES, else its devices."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(list(devices.glob("nvidia[0-9]*")))


def memory_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel has killed a process of this container at its memory limit."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def interface_of(address: str) -> str:
    """Name of the network interface that has this IPv4 address, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def is_own(address: str) -> bool:
    """Whether this IPv4 or IPv6 address belongs to this machine or container."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_free(port: int) -> bool:
    """Whether a server of this process could listen on this TCP port."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
    except OSError:
        return False
    return True


def listener(port: int) -> int | None:
    """The process that listens on this TCP port; None where that is nobody, or not for us to see (Linux)."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                local, state = words[1], words[3]
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link) in sockets:
                        return int(process.name)
    return None


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when its parent ends, also when that is killed (Linux)."""
    if hasattr(ctypes, "CDLL") and os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def reap_orphans() -> None:
    """Let go of children that have ended; those of the ranks that were adopted would stay zombies for ever."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent ends, as process 1 is by nature (Linux)."""
    if os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
