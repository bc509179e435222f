"""Where checkpoints in memory are kept in a pod, and how much they may take: in memory, or on a local disk instead."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path
from typing import Final

from flk_runtime.system import host

PREFIX: Final = "flk-"  # of the folders of launchers
SHARE: Final = 0.5  # of the memory, or of the disk, that could be used
_MOUNTS: Final = Path("/proc/self/mounts")


def limit(folder: str, wanted: int | None) -> int:
    """Bytes that the shards in ``folder`` may take: ``wanted`` if it is given, else half of the memory that there is.

    This memory is the size of the file system, or the memory limit of the container if it is lower: files in memory
    count as memory of the container, and a container that exceeds its limit is killed.
    """
    if wanted is not None:
        return wanted
    sizes = [host.memory_limit()]
    with contextlib.suppress(OSError):
        info = os.statvfs(folder)
        sizes.append(info.f_blocks * info.f_frsize)
    return int(min(sizes) * SHARE)


def is_in_memory(folder: str, mounts: Path = _MOUNTS) -> bool:
    """Return whether a folder that exists is in a file system that is in memory (tmpfs or ramfs)."""
    return _mount(folder, mounts)[1] in ("tmpfs", "ramfs")


def mount_point(folder: str, mounts: Path = _MOUNTS) -> str:
    """Return the mount point of the file system of a folder that exists, such as /dev/shm; else the folder."""
    return _mount(folder, mounts)[0] or folder


def _mount(folder: str, mounts: Path) -> tuple[str, str]:
    """The mount point and the kind of the file system of a folder; empty where they are unknown."""
    place, kind = "", ""
    with contextlib.suppress(OSError):
        real = os.path.realpath(folder)
        for line in mounts.read_text().splitlines():
            words = line.split()
            inside = real == words[1] or real.startswith(words[1].rstrip("/") + "/")
            if inside and len(words[1]) >= len(place):
                place, kind = words[1], words[2]
    return place, kind


def own_folder(root: str, job: str, uid: str, pod: int) -> Path:
    """The folder of one pod's launcher. Its path is short, since a socket's path has at most 107 characters."""
    name = hashlib.sha256(f"{job} {uid}".encode()).hexdigest()[:12]
    return Path(root, f"{PREFIX}{name}-{pod}")


_LEFT: Final = 3600.0  # seconds since the last save after which a folder that no launcher uses is removed


def disk_limit(folder: Path, wanted: int | None, most: int) -> int:
    """Bytes that the shards in ``folder`` may take: ``wanted`` if it is given, else half of the room that there is.

    This is what is free on the disk or was used by an earlier launcher of this pod, and at most ``most`` bytes, if that
    is not 0: a pod that takes more is evicted. Pages of these files can be written and given up, so memory is no limit.
    """
    if wanted is not None:
        return wanted
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize + sum(path.stat().st_blocks << 9 for path in folder.iterdir())
    return int(min(free, most or free) * SHARE)


def take(folder: Path) -> int:
    """Have this process own a folder on a disk, and remove the folders that other launchers have left beside it.

    Returns a descriptor, which holds the folder's lock. A disk of a node stays when its pods are gone. What a killed
    launcher has left stays for an hour, since it may start again. Raises OSError if another launcher uses the folder.
    """
    descriptor = _lock(folder)
    for left in folder.parent.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):  # it is in use, or gone
            changed = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if left != folder and changed < time.time() - _LEFT:
                lock = _lock(left)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    return descriptor


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
