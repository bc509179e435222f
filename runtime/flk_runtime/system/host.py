"""Facts and operations of this container: CPUs, GPUs, OOM kills, network addresses and ports, child processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NoReturn

from flk_runtime.contract import pod_layout

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFADDR = 0x8915 if pod_layout.LINUX else 0xC0206921
_LOOK_AT_PARENT = 0.5  # seconds, where the kernel does not tell that it has ended
_OPEN_FILES = 1 << 20  # a process needs no more, and some programs close all descriptors below the limit
_RESOURCE_TRACKER = b"from multiprocessing.resource_tracker import main"  # in the command line of Python's own
_ROUNDS = 10  # of killing the processes that a process group has started meanwhile


def cpu_count(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of CPUs that this container may use: its affinity, or its CPU limit rounded up if that is less."""
    count = len(os.sched_getaffinity(0)) if pod_layout.LINUX else os.cpu_count() or 1
    limit = cpu_limit(root)
    return count if limit is None else min(count, max(1, math.ceil(limit)))


def cpu_limit(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU limit of this container; None: it has none."""
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000" or "150000 100000"
        quota, period = (root / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # cgroup v1: -1 means no limit
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    return None


def oom_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Number of processes of this container that the kernel has killed at the memory limit."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


def memory_limit(root: Path = Path("/sys/fs/cgroup"), info: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that this container may use: its limit, or the memory of the machine if that is less."""
    if not pod_layout.LINUX:
        return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
    total = int(re.search(r"MemTotal:\s+(\d+) kB", info.read_text())[1]) << 10  # type: ignore[index]
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):  # cgroup v2 ("max": none), v1
        with contextlib.suppress(OSError, ValueError):
            return min(total, int(path.read_text()))
    return total


def resident_bytes(process: int) -> int:
    """Bytes of memory that this process has resident; 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc", str(process), "statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def source_address(destination: str) -> str:
    """The address of this container from which packets to an address or host name leave; empty if there is no route.

    Sends nothing.
    """
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def allocate(file: int, size: int) -> None:
    """Give an open file at least so many bytes. Raises OSError where the file system has no room, on Linux."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif os.fstat(file).st_size < size:
        os.ftruncate(file, size)


def write_synced(path: Path, data: bytes, *, is_new: bool = False) -> None:
    """Write a file whose bytes are on the disk when this returns. Raises OSError; if it ``is_new``, also if it exists.

    Its name is not: that is for whoever syncs the folder.
    """
    with open(path, "xb" if is_new else "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data`` to a descriptor; if the reader has closed it, the rest is dropped."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # a process that has the same terminal or pipe has made it non-blocking
                select.select([], [fd], [])


def is_loopback(address: str) -> bool:
    """Return whether this IPv4 or IPv6 address, or the name localhost, is of the loopback interface."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_with_address(address: str, table: Path = Path("/proc/net/if_inet6")) -> str:
    """Name of the network interface that has this IPv4 or IPv6 address, or an empty string.

    ``table`` lists the IPv6 addresses, in hex without colons in the first column, and the interface in the last one.
    """
    if ":" in address:
        with contextlib.suppress(OSError):
            wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            for line in table.read_text().splitlines():
                words = line.split()
                if words[0] == wanted:
                    return words[-1]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the signal ``number`` sent to this process when the process ``parent`` ends.

    Elsewhere than on Linux a thread does it, which a process that is executed in the place of this one has not.
    """
    if pod_layout.LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=_watch_parent, args=(parent, number), name="flk-parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def _watch_parent(parent: int, number: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_AT_PARENT)
    os.kill(os.getpid(), number)


def reap_orphans(keep: Callable[[], Collection[int]] = list) -> None:
    """Wait for adopted processes that have ended, which would stay zombies otherwise (Linux only).

    ``keep`` returns processes that others in this process wait for. If one of them has ended, the rest is left for
    later.
    """
    if not pod_layout.LINUX:
        return  # it has adopted none
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in keep():
                return
            os.waitpid(ended.si_pid, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as process 1 does (Linux only)."""
    if pod_layout.LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Name this thread, the main one of a process, with up to 15 bytes, which top and ``ps -A`` show (Linux only)."""
    if pod_layout.LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode())


def raise_open_files_limit() -> None:
    """Raise the limit of open files to the hard limit, at most 1,048,576, for this process and its children.

    The launcher of pod 0 holds a connection to each pod, and ranks hold many to each other.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def kill_group(group: int) -> None:
    """Send SIGKILL to all processes of a group but Python's resource trackers.

    When the others have ended, a tracker removes their shared memory and semaphores, and ends by itself.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        processes = _processes_of_group(group)
        trackers = set(filter(_is_resource_tracker, processes))
        if not trackers:
            break
        others = processes - trackers - killed
        if not others:
            return
        for process in sorted(others, key=lambda process: process != group):  # its leader must not see the others end
            _kill(process)
        killed |= others
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_adopted(keep: Callable[[], Iterable[int]], *, spare_trackers: bool) -> int:
    """Send SIGKILL to all child processes of this process but those that ``keep`` returns. Returns how many there were.

    After `adopt_orphans` they are processes that others have left behind, also in a session of their own. When one of
    them ends, its children become children of this process, so call it again until it returns 0. ``spare_trackers``:
    let Python's resource trackers, which count too, end by themselves (see `kill_group`).
    """
    left = children()  # before `keep` is asked, so that it knows all of them
    left.difference_update(keep())
    for child in left:
        if not (spare_trackers and _is_resource_tracker(child)):
            _kill(child)
    return len(left)


def children(process: int | str = "self") -> set[int]:
    """The child processes of a process, by default of this one, as far as /proc shows them.

    That takes Linux with CONFIG_PROC_CHILDREN.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):  # not Path.glob: it raises when a process ends meanwhile
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split()))
    return found


def descendants(process: int) -> list[int]:
    """The processes below a process, each after its parent, as `children` finds them."""
    return [each for child in sorted(children(process)) for each in (child, *descendants(child))]


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def _processes_of_group(group: int) -> set[int]:
    """The processes of a group that /proc shows to this one."""
    found = set()
    with contextlib.suppress(FileNotFoundError):  # not Linux
        for name in os.listdir("/proc"):
            with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):  # no process; or it has ended
                if os.getpgid(int(name)) == group:
                    found.add(int(name))
    return found


def _is_resource_tracker(process: int) -> bool:
    try:
        return _RESOURCE_TRACKER in Path("/proc", str(process), "cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def exit_at_once(code: int) -> NoReturn:
    """End this process without its exit handlers, and although its threads run. Its output is flushed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
