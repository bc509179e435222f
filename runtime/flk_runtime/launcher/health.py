"""Health of a pod, which its launcher checks before it joins: a broken node then ends no attempt of all pods.

It is checked at the start of the launcher, and after an attempt that a broken node may have ended. It takes
milliseconds on a healthy node. A fault is a failure of kind UNHEALTHY, whose message names it.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from flk_runtime.contract import user_env
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.launcher.settings import Settings

TIMEOUT: Final = 5.0  # seconds that the check may take; what takes longer does not answer
_PAGE: Final = 4096  # bytes that are written to each place
# Errors of a disk or its server. Others are the job's own: a full or a read-only volume, a folder without rights.
_OF_DISK: Final = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT)


def of_pod(settings: Settings, environ: Mapping[str, str]) -> str:
    """What is wrong with this pod or its node, in one sentence; empty if nothing is found."""
    checkpoint = environ.get(user_env.CHECKPOINT, "")
    folders = {
        "memory for checkpoints": settings.memory_path or settings.memory_root,
        "the folder of the checkpoints": "" if is_address(checkpoint) else checkpoint,
    }
    return find_fault(settings.gpus, {name: folder for name, folder in folders.items() if folder}, _gpu_faults)


def _gpu_faults(wanted: int) -> Iterable[str]:
    from flk_runtime.launcher.gpu_health import gpu_faults, read_gpus  # only jobs with GPUs have this module

    return gpu_faults(wanted, read_gpus())


def find_fault(gpus: int, folders: Mapping[str, str], gpu_faults: Callable[[int], Iterable[str]]) -> str:
    """What is wrong with this pod or its node, in one sentence; empty if nothing is found within TIMEOUT.

    ``gpus`` is how many the pod has requested, of which ``gpu_faults`` yields the faults. ``folders`` are the places
    that ranks write to, by what they are called.
    """
    found: list[str] = []
    place = [""]  # that is checked now

    def look() -> None:
        for name, folder in folders.items():
            place[0] = name
            found.extend(_disk_fault(name, folder))
        if gpus:
            place[0] = "the driver of the GPUs"
            found.extend(gpu_faults(gpus))
        place[0] = ""

    thread = threading.Thread(target=look, name="health", daemon=True)  # a system call may never return
    thread.start()
    thread.join(TIMEOUT)
    if place[0]:
        found.append(f"{place[0]} does not answer for {TIMEOUT:g} s")
    return "; ".join(found)


def _disk_fault(name: str, folder: str) -> Iterator[str]:
    """Write a page to a folder, or to the nearest one above it that exists."""
    path = Path(folder)
    try:
        while not path.is_dir() and path != path.parent:
            path = path.parent
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(_PAGE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in _OF_DISK:
            yield f"cannot write to {name} ({path}): {error.strerror}"
