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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from flk_runtime.contract import user_env
from flk_runtime.contract.failure import BEFORE_FIRST, Failure, Kind
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.errors import StorageError
from flk_runtime.launcher.settings import Settings
from flk_runtime.system.faults import DISK_ERRNOS

# Numbers of errors of a disk where a regular file is written. A script has them also of a terminal or a FIFO.
_FAULTS: Final = DISK_ERRNOS | {errno.ENXIO, errno.ENODEV}
TIMEOUT: Final = 5.0  # seconds that the check may take; what takes longer does not answer
_PAGE: Final = 4096  # bytes that are written to each place


_CHECKPOINTS: Final = "the folder of the checkpoints"


class Fault(NamedTuple):
    """What is wrong with a pod or its node."""

    message: str  # one sentence; empty: nothing is wrong
    of_storage: bool = False
    """Only storage that all pods share has failed, which may be its own fault rather than the node's."""


def check(settings: Settings, attempt: int = BEFORE_FIRST) -> list[Failure]:
    """The fault of this pod or its node, as a failure of ``attempt``, if there is one and the pod is to be checked."""
    if not (settings.health and settings.trains):
        return []
    fault = of_pod(settings, os.environ)
    place = settings.pod, None, settings.pod_name, settings.node
    type_ = StorageError.__name__ if fault.of_storage else ""
    failure = Failure(Kind.UNHEALTHY, *place, attempt, time.time(), type=type_, message=fault.message)
    return [failure] if fault.message else []


def of_pod(settings: Settings, environ: Mapping[str, str]) -> Fault:
    """What is wrong with this pod or its node."""
    checkpoint = environ.get(user_env.CHECKPOINT, "")
    folders = {
        "memory for checkpoints": settings.memory_path or settings.memory_root,
        _CHECKPOINTS: "" if is_address(checkpoint) else checkpoint,
    }
    return find_fault(settings.gpus, {name: folder for name, folder in folders.items() if folder}, _gpu_faults)


def _gpu_faults(wanted: int) -> Iterable[str]:
    from flk_runtime.launcher.telemetry.gpu_health import gpu_faults, read_gpus  # not every job needs it

    return gpu_faults(wanted, read_gpus())


def find_fault(gpus: int, folders: Mapping[str, str], gpu_faults: Callable[[int], Iterable[str]]) -> Fault:
    """What is wrong with this pod or its node. What is not found within TIMEOUT does not answer.

    ``gpus`` is how many the pod has requested, of which ``gpu_faults`` yields the faults. ``folders`` are the places
    that ranks write to, by what they are called.
    """
    found: list[tuple[str, str]] = []  # the place and what is wrong with it
    place = [""]  # that is checked now

    def look() -> None:
        if gpus:
            place[0] = "the driver of the GPUs"
            found.extend((place[0], fault) for fault in gpu_faults(gpus))
        for name, folder in folders.items():
            place[0] = name
            found.extend((name, fault) for fault in _disk_fault(name, folder))

    thread = threading.Thread(target=look, name="health", daemon=True)  # a system call may never return
    thread.start()
    thread.join(TIMEOUT)
    if thread.is_alive():
        found.append((place[0], f"{place[0]} does not answer for {TIMEOUT:g} s"))
    return Fault("; ".join(fault for _, fault in found), {name for name, _ in found} == {_CHECKPOINTS})


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


def _is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder. Raises OSError where a disk fails, for which Path.is_dir may return False."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
