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
_XID_EVENT: Final = 8  # nvmlEventTypeXidCriticalError
_MOST_EVENTS: Final = 1000  # that are read at once
# Xid errors after which NVIDIA's catalogue of them has the GPU reset or the node repaired. Others are errors of
# programs, or are seen in the remapped rows.
_XIDS: Final = {
    48: "an uncorrectable memory error",
    62: "its power management has halted",
    64: "a row of its memory could not be replaced",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its system processor does not answer",
    120: "an error of its system processor",
}


@dataclass(frozen=True)
class Gpu:
    """What NVML says about one GPU."""

    lost: bool = False  # it has fallen off the bus
    error: int = 0  # of NVML, when it asked for the GPU
    remap_pending: bool = False  # a row of its memory had uncorrectable errors, and a reset has to replace it
    remap_failed: bool = False  # a row could not be replaced
    xid: int = 0  # the first Xid error of _XIDS since the last look; 0: none


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
            yield f"GPU {index} reported Xid {gpu.xid}: {_XIDS[gpu.xid]}"


def read_gpus() -> list[Gpu] | None:
    """What NVML says about the GPUs of this container; None where there is no NVML, or it does not start.

    NVML tells Xid errors only to who has waited for them: the first call begins to.
    """
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
        xids = _xids(nvml, count.value)
        return [_read(nvml, index, xids) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


class _Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_events: ctypes.c_void_p | None = None  # the set of events that this process waits for


def _xids(nvml: ctypes.CDLL, count: int) -> dict[int | None, int]:
    """The first Xid error of _XIDS since the last call, by the handles of the GPUs. The first call finds none."""
    global _events
    found: dict[int | None, int] = {}
    with contextlib.suppress(AttributeError):  # a driver without events
        if _events is None:
            events = ctypes.c_void_p()
            if nvml.nvmlEventSetCreate(ctypes.byref(events)):
                return found
            nvml.nvmlInit_v2()  # NVML counts its users, and forgets the set with the last one
            for index in range(count):
                handle = ctypes.c_void_p()
                if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                    nvml.nvmlDeviceRegisterEvents(handle, ctypes.c_ulonglong(_XID_EVENT), events)
            _events = events
        event = _Event()
        for _ in range(_MOST_EVENTS):
            if nvml.nvmlEventSetWait_v2(_events, ctypes.byref(event), 0):
                break
            if event.type == _XID_EVENT and event.data in _XIDS:
                found.setdefault(event.device, event.data)
    return found


def _read(nvml: ctypes.CDLL, index: int, xids: Mapping[int | None, int]) -> Gpu:
    handle = ctypes.c_void_p()
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: asks the GPU itself
    error = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    error = error or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if error:
        return Gpu(lost=error == _GPU_IS_LOST, error=error)
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    with contextlib.suppress(AttributeError):  # a driver before 450
        nvml.nvmlDeviceGetRemappedRows(handle, *map(ctypes.byref, rows))  # GPUs before A100 have none: all stay 0
    return Gpu(remap_pending=bool(rows[2].value), remap_failed=bool(rows[3].value), xid=xids.get(handle.value, 0))
