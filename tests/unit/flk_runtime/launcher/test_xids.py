"""Xid errors that NVML tells."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flk_runtime.launcher import health, xids
from flk_runtime.launcher.health import Gpu
from tests.unit.flk_runtime.launcher.test_health import Nvml


class NvmlWithEvents(Nvml):
    """The library with Xid errors, which it tells those who have registered before: ``happens`` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.users = 0
        self.registered: dict[int | None, int] = {}
        self.events: list[tuple[int, int, int]] = []  # device, type, data

    def happens(self, device: int, xid: int, kind: int = 8) -> None:
        if self.registered.get(device, 0) & kind:
            self.events.append((device, kind, xid))

    def nvmlInit_v2(self) -> int:
        self.users += 1
        return 0

    def nvmlShutdown(self) -> None:
        self.users -= 1
        if not self.users:
            self.registered = {}

    def nvmlEventSetCreate(self, events: Any) -> int:
        events._obj.value = 77
        return 0

    def nvmlDeviceRegisterEvents(self, handle: ctypes.c_void_p, kinds: ctypes.c_ulonglong, events: Any) -> int:
        assert events.value == 77
        self.registered[handle.value] = kinds.value
        return 0

    def nvmlEventSetWait_v2(self, events: Any, data: Any, timeout: int) -> int:
        assert (events.value, timeout, ctypes.sizeof(data._obj)) == (77, 0, 32)
        if not self.events:
            return 10  # NVML_ERROR_TIMEOUT
        data._obj.device, data._obj.type, data._obj.data = self.events.pop(0)
        return 0


def test_xid_errors_are_of_the_gpu_that_reported_them_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = NvmlWithEvents()
    monkeypatch.setattr(health.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(xids, "_events", None)
    assert health.read_gpus() == [Gpu(), Gpu()]
    nvml.happens(4097, 31)  # a fault of the program's addresses
    nvml.happens(4097, 74)
    nvml.happens(4097, 79)
    assert health.read_gpus() == [Gpu(), Gpu(xid="74: an error of NVLink")]
    assert health.read_gpus() == [Gpu(), Gpu()]
