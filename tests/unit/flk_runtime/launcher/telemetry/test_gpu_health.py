"""What a launcher finds wrong with its GPUs, from NVML's answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flk_runtime.launcher.telemetry import gpu_health, health
from flk_runtime.launcher.telemetry.gpu_health import Gpu


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        ([Gpu(), Gpu()], ""),
        ([Gpu()], "1 GPU of 2 can be seen"),
        ([Gpu(), Gpu(lost=True, error=15)], "GPU 1 is lost: it has fallen off the bus"),
        ([Gpu(error=999), Gpu()], "GPU 0 does not answer (NVML error 999)"),
        ([Gpu(remap_pending=True), Gpu()], "GPU 0 had an uncorrectable memory error and needs a reset"),
        (
            [Gpu(remap_pending=True, remap_failed=True), Gpu()],
            "GPU 0 has memory with uncorrectable errors that cannot be replaced",
        ),
        ([Gpu(), Gpu(xid="79: it has fallen off the bus")], "GPU 1 reported Xid 79: it has fallen off the bus"),
        (None, ""),  # no NVML
    ],
)
def test_gpus(seen: list[Gpu] | None, fault: str) -> None:
    assert health.find_fault(2, {}, lambda wanted: gpu_health.gpu_faults(wanted, seen)) == (fault, False)


class Nvml:
    """The library as it answers on a node with two GPUs; ``answers`` are the return codes of its functions."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.closed = False

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return self.answers.get("count", 0)

    def nvmlInit_v2(self) -> int:
        return self.answers.get("init", 0)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 4096 + index
        return self.answers.get("handle", 0) if index else 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert ctypes.sizeof(memory._obj) == 24
        return self.answers.get("memory", 0) if handle.value == 4097 else 0

    def nvmlDeviceGetRemappedRows(self, handle: ctypes.c_void_p, *rows: Any) -> int:
        for row, value in zip(rows, (0, 1, self.answers.get("pending", 0), self.answers.get("failed", 0)), strict=True):
            row._obj.value = value
        return 0


@pytest.mark.parametrize(
    ("answers", "second"),
    [
        ({}, Gpu()),
        ({"handle": 15}, Gpu(lost=True, error=15)),
        ({"memory": 999}, Gpu(error=999)),
        ({"pending": 1}, Gpu(remap_pending=True)),
        ({"failed": 1}, Gpu(remap_failed=True)),
        ({"init": 9}, None),
        ({"count": 9}, None),
    ],
)
def test_answers_of_nvml(monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], second: Gpu | None) -> None:
    nvml = Nvml(**answers)
    monkeypatch.setattr(gpu_health.ctypes, "CDLL", lambda name: nvml)
    seen = gpu_health.read_gpus()
    assert (seen[1] if seen else None) == second
    assert nvml.closed == ("init" not in answers)


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
    monkeypatch.setattr(gpu_health.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(gpu_health, "_events", None)
    assert gpu_health.read_gpus() == [Gpu(), Gpu()]
    nvml.happens(4097, 31)  # a fault of the program's addresses
    nvml.happens(4097, 74)
    nvml.happens(4097, 79)
    assert gpu_health.read_gpus() == [Gpu(), Gpu(xid="74: an error of NVLink")]
    assert gpu_health.read_gpus() == [Gpu(), Gpu()]
