"""Xid errors of GPUs, as NVML tells them to those who wait for them."""

from __future__ import annotations

import ctypes
from typing import Final

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


def read_xids(nvml: ctypes.CDLL, count: int) -> dict[int | None, str]:
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
            found.setdefault(event.device, f"{event.data}: {_XIDS[event.data]}")
    return found
