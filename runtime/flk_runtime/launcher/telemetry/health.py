"""Health of a pod, which its launcher checks before it joins: a broken node then ends no attempt of all pods.

It is checked at the start of the launcher, and after an attempt that a broken node may have ended. It takes
milliseconds on a healthy node. A fault is a failure of kind UNHEALTHY, whose message names it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from flk_runtime.contract.failure import BEFORE_FIRST, Failure, Kind
from flk_runtime.launcher.settings import Settings
from flk_runtime.system.faults import DISK_ERRNOS

# Numbers of errors of a disk where a regular file is written. A script has them also of a terminal or a FIFO.
_FAULTS: Final = DISK_ERRNOS | {errno.ENXIO, errno.ENODEV}
TIMEOUT: Final = 5.0  # seconds that the check may take; what takes longer does not answer
_PAGE: Final = 4096  # bytes that are written to each place


def check(settings: Settings, attempt: int = BEFORE_FIRST) -> list[Failure]:
    """The fault of this pod or its node, as a failure of ``attempt``, if there is one and the pod is to be checked."""
    if not (settings.health and settings.trains):
        return []
    message = find_fault(settings.gpus, settings.memory_root, _gpu_faults)
    place = settings.pod, None, settings.pod_name, settings.node
    return [Failure(Kind.UNHEALTHY, *place, attempt, time.time(), message=message)] if message else []


def _gpu_faults(wanted: int) -> Iterable[str]:
    from flk_runtime.launcher.telemetry.usage import find_faults, read_health  # not every job needs it

    return find_faults(wanted, read_health())


def find_fault(gpus: int, folder: str, gpu_faults: Callable[[int], Iterable[str]]) -> str:
    """What is wrong with this pod or its node; empty if nothing is. What is not found within TIMEOUT does not answer.

    ``gpus`` is how many the pod has requested, of which ``gpu_faults`` yields the faults. ``folder`` is the place of
    checkpoints in memory; empty: there is none.
    """
    found: list[str] = []
    place = [""]  # that is checked now

    def look() -> None:
        if gpus:
            place[0] = "the driver of the GPUs"
            found.extend(gpu_faults(gpus))
        if folder:
            place[0] = "memory for checkpoints"
            found.extend(_disk_fault(place[0], folder))

    thread = threading.Thread(target=look, name="health", daemon=True)  # a system call may never return
    thread.start()
    thread.join(TIMEOUT)
    if thread.is_alive():
        found.append(f"{place[0]} does not answer for {TIMEOUT:g} s")
    return "; ".join(found)


def _is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. Raises OSError where a disk fails, for which Path.is_dir may return False."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _disk_fault(name: str, folder: str) -> Iterator[str]:
    """Write a page to a folder, or to the nearest one above it that exists."""
    path = Path(folder)
    try:
        while not _is_folder(path) and path != path.parent:
            path = path.parent
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_PAGE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in _FAULTS:  # others are the job's own: a full or read-only volume, a folder without rights
            yield f"cannot write to {name} ({path}): {error.strerror}"
