"""Health of the GPUs of a pod, as NVML tells it, for `flk_runtime.launcher.telemetry.health`."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flk_runtime.contract.ranges import plural
from flk_runtime.launcher.telemetry.gpus import find_gpus, open_nvml

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
    xid: str = ""  # the first Xid error of a broken GPU since the last look, with what it means


def gpu_faults(wanted: int, gpus: list[Gpu] | None) -> Iterator[str]:
    """The faults of the GPUs of a pod that has requested so many."""
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
    """What NVML says about the GPUs of this pod; None where there is no NVML, or it does not start."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        found = find_gpus(nvml)
        if found is None:
            return None
        xids: Mapping[int | None, str] = {}
        with contextlib.suppress(AttributeError):  # a driver that cannot tell them
            xids = _read_xids(nvml, [handle for handle, error in found if not error])
        return [_read(nvml, handle, error, xids) for handle, error in found]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: ctypes.CDLL, handle: ctypes.c_void_p, error: int, xids: Mapping[int | None, str]) -> Gpu:
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: asks the GPU itself
    error = error or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if error:
        return Gpu(lost=error == _GPU_IS_LOST, error=error)
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    with contextlib.suppress(AttributeError):  # a driver before 450
        nvml.nvmlDeviceGetRemappedRows(handle, *map(ctypes.byref, rows))  # GPUs before A100 have none: all stay 0
    return Gpu(remap_pending=bool(rows[2].value), remap_failed=bool(rows[3].value), xid=xids.get(handle.value, ""))


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


def _read_xids(nvml: ctypes.CDLL, handles: Sequence[ctypes.c_void_p]) -> dict[int | None, str]:
    """The first Xid error of a broken GPU since the last call, with what it means, by the handles of the GPUs.

    NVML tells such errors only to who has waited for them: the first call begins to, and finds none. Raises
    AttributeError for a driver that cannot tell them.
    """
    global _events
    found: dict[int | None, str] = {}
    if _events is None:
        events = ctypes.c_void_p()
        if nvml.nvmlEventSetCreate(ctypes.byref(events)):
            return found
        nvml.nvmlInit_v2()  # NVML counts its users, and forgets the set with the last one
        for handle in handles:
            nvml.nvmlDeviceRegisterEvents(handle, ctypes.c_ulonglong(_XID_EVENT), events)
        _events = events
    event = _Event()
    for _ in range(_MOST_EVENTS):
        if nvml.nvmlEventSetWait_v2(_events, ctypes.byref(event), 0):
            break
        if event.type == _XID_EVENT and event.data in _XIDS:
            found.setdefault(event.device, f"{event.data}: {_XIDS[event.data]}")
    return found
