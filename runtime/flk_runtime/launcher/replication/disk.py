"""Checkpoints on a local disk instead of memory: who uses a folder there, and how much they may take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Final

from flk_runtime.launcher.replication import room

_LEFT: Final = 3600.0  # seconds since the last save after which a folder that no launcher uses is removed


def limit(folder: Path, wanted: int | None, most: int) -> int:
    """Bytes that the shards in ``folder`` may take: ``wanted`` if it is given, else half of the room that there is.

    This is what is free on the disk or was used by an earlier launcher of this pod, and at most ``most`` bytes, if that
    is not 0: a pod that takes more is evicted. Pages of these files can be written and given up, so memory is no limit.
    """
    if wanted is not None:
        return wanted
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize + sum(path.stat().st_blocks << 9 for path in folder.iterdir())
    return int(min(free, most or free) * room.SHARE)


def take(folder: Path) -> int:
    """Have this process own a folder on a disk, and remove the folders that other launchers have left beside it.

    Returns a descriptor, which holds the folder's lock. A disk of a node stays when its pods are gone. What a killed
    launcher has left stays for an hour, since it may start again. Raises OSError if another launcher uses the folder.
    """
    descriptor = _lock(folder)
    for left in folder.parent.glob(f"{room.PREFIX}*-*"):
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
