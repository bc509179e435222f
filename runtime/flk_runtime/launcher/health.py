"""Health of a pod, which its launcher checks before it joins: a broken node then ends no attempt of all pods.

It is checked at the start of the launcher, and after an attempt that a broken node may have ended. It takes
milliseconds on a healthy node. A fault is a failure of kind UNHEALTHY, whose message names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flk_runtime.contract import user_env
from flk_runtime.contract.ranges import plural
from flk_runtime.launcher.settings import Settings

TIMEOUT: Final = 5.0  # seconds that the check may take; what takes longer does not answer
_PAGE: Final = 4096  # bytes that are written to each place
# Errors of a disk or its server. Others are the job's own: a full or a read-only volume, a folder without rights.
_OF_DISK: Final = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO, errno.ENODEV, errno.ETIMEDOUT)
_NVML: Final = "libnvidia-ml.so.1"
_GPU_IS_LOST: Final = 15  # NVML_ERROR_GPU_IS_LOST


@dataclass(frozen=True)
class Gpu:
    """What NVML says about one GPU."""

    lost: bool = False  # it has fallen off the bus
    error: int = 0  # of NVML, when it asked for the GPU
    remap_pending: bool = False  # a row of its memory had uncorrectable errors, and a reset has to replace it
    remap_failed: bool = False  # a row could not be replaced
    xid: str = ""  # the first Xid error of a broken GPU since the last look, with what it means


def of_pod(settings: Settings, environ: Mapping[str, str]) -> str:
    """What is wrong with this pod or its node, in one sentence; empty if nothing is found."""
    folders = {
        "memory for checkpoints": settings.memory_path or settings.memory_root,
        "the folder of the checkpoints": _folder(environ),
    }
    return find_fault(settings.gpus, {name: folder for name, folder in folders.items() if folder}, read_gpus)


def _folder(environ: Mapping[str, str]) -> str:
    checkpoint = environ.get(user_env.CHECKPOINT, "")
    return "" if "://" in checkpoint else checkpoint


def find_fault(gpus: int, folders: Mapping[str, str], read_gpus: Callable[[], list[Gpu] | None]) -> str:
    """What is wrong with this pod or its node, in one sentence; empty if nothing is found within TIMEOUT.

    ``gpus`` is how many the pod has requested. ``folders`` are the places that ranks write to, by what they are called.
    """
    found: list[str] = []
    place = [""]  # that is checked now

    def look() -> None:
        for name, folder in folders.items():
            place[0] = name
            found.extend(_disk_fault(name, folder))
        if gpus:
            place[0] = "the driver of the GPUs"
            found.extend(_gpu_faults(gpus, read_gpus()))
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


def _gpu_faults(wanted: int, gpus: list[Gpu] | None) -> Iterator[str]:
    if gpus is None:
        return
    if len(gpus) < wanted:
        yield f"{plural(len(gpus), 'GPU')} of {wanted} can be seen"
    for index, gpu in enumerate(gpus):
        if gpu.lost:
            yield f"GPU {index} is lost: it has fallen off the bus"
        elif gpu.error:
            yield f"GPU {index} does not answer (NVML error {gpu.error})"
        elif gpu.remap_failed:
            yield f"GPU {index} has memory with uncorrectable errors that cannot be replaced"
        elif gpu.remap_pending:
            yield f"GPU {index} had an uncorrectable memory error and needs a reset"
        elif gpu.xid:
            yield f"GPU {index} reported Xid {gpu.xid}"


def read_gpus() -> list[Gpu] | None:
    """What NVML says about the GPUs of this container; None where there is no NVML, or it does not start."""
    try:
        nvml = ctypes.CDLL(_NVML)
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        xids: Mapping[int | None, str] = {}
        with contextlib.suppress(ModuleNotFoundError, AttributeError):  # only jobs with GPUs have it; an old driver
            from flk_runtime.launcher.xids import read_xids

            xids = read_xids(nvml, count.value)
        return [_read(nvml, index, xids) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: ctypes.CDLL, index: int, xids: Mapping[int | None, str]) -> Gpu:
    handle = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: asks the GPU itself
    error = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    error = error or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if error:
        return Gpu(lost=error == _GPU_IS_LOST, error=error)
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    with contextlib.suppress(AttributeError):  # a driver before 450
        nvml.nvmlDeviceGetRemappedRows(handle, *map(ctypes.byref, rows))  # GPUs before A100 have none: all stay 0
    return Gpu(remap_pending=bool(rows[2].value), remap_failed=bool(rows[3].value), xid=xids.get(handle.value, ""))
