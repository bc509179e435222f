"""What NVML says about the GPUs of a pod, with a library that answers as the recorded one did."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flk_runtime.contract.telemetry import GpuUsage
from flk_runtime.launcher.telemetry import usage as module
from flk_runtime.launcher.telemetry.usage import find_faults, find_gpus, open_gpus, read_errors, read_gpus

_INVALID, _NOT_FOUND, _UNKNOWN = 2, 6, 999  # NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, NVML_ERROR_UNKNOWN


class Nvml:
    """A machine with three GPUs, of which the second one may not answer."""

    def __init__(self, **answers: int) -> None:
        """``answers`` are the return codes of functions, for the second GPU where they ask for one."""
        self.answers = answers
        self.closed = False

    def _answer(self, name: str, handle: Any) -> int:
        return self.answers.get(name, 0) if handle.value == 101 else 0

    def nvmlInit_v2(self) -> int:
        return self.answers.get("init", 0)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return self.answers.get("count", 0)

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 100 + index if index < 3 else None
        return self._answer("handle", handle._obj) if index < 3 else _INVALID

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 102 if name == b"GPU-c" else None
        return 0 if name == b"GPU-c" else _NOT_FOUND

    def nvmlDeviceGetUtilizationRates(self, handle: Any, shares: Any) -> int:
        shares._obj[0], shares._obj[1] = 97, 40
        return self._answer("rates", handle)

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj[0], memory._obj[1], memory._obj[2] = 85520809984, 80000000000, 5520809984
        return self._answer("memory", handle)


def test_a_gpu_that_answers_is_read_and_another_one_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert read_gpus(Nvml(rates=_UNKNOWN)) == [GpuUsage(0.97, 5520809984, 85520809984)]


def test_there_are_none_without_the_library(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "NVML", "libno-such-library.so.1")
    assert open_gpus()() == []
    assert read_errors() is None


@pytest.mark.parametrize(
    ("visible", "handles"),
    [
        (None, [(100, 0), (101, 0), (102, 0)]),
        ("1", [(101, 0)]),
        ("2, 0", [(102, 0), (100, 0)]),
        ("GPU-c", [(102, 0)]),
        ("", []),
        ("7,GPU-x", [(None, _INVALID), (None, _NOT_FOUND)]),
    ],
)
def test_the_variable_names_the_gpus_of_the_pod(visible: str | None, handles: list[tuple[int | None, int]]) -> None:
    found = find_gpus(Nvml(), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [(handle.value, error) for handle, error in found or ()] == handles


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ({}, ""),
        ({"handle": 15}, "GPU 1 is lost: it has fallen off the bus"),
        ({"memory": _UNKNOWN}, "GPU 1 does not answer (NVML error 999)"),
        ({"memory": 4}, ""),  # NVML_ERROR_NO_PERMISSION: to a container with a part of a GPU (MIG)
        ({"memory": 3}, ""),  # NVML_ERROR_NOT_SUPPORTED: the GPU has the memory of the host
        ({"init": 9}, ""),  # nothing is known then
        ({"count": 9}, ""),
    ],
)
def test_faults(monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], fault: str) -> None:
    """A broken GPU of others is no fault of this pod."""
    nvml = Nvml(**answers)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    seen = read_errors()
    assert list(find_faults(2, seen)) == ([fault] if fault else [])
    assert nvml.closed == ("init" not in answers)


def test_gpus_that_cannot_be_seen() -> None:
    assert list(find_faults(2, [0])) == ["1 GPU of 2 can be seen"]
