"""Which of a machine's GPUs a pod has: NVML shows all of them."""

from __future__ import annotations

from typing import Any

import pytest

from flk_runtime.launcher.telemetry.gpu_health import Gpu, read_gpus
from flk_runtime.launcher.telemetry.gpus import find_gpus

_INVALID, _NOT_FOUND = 2, 6  # NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND


class Nvml:
    """A machine with three GPUs, of which the last one needs a reset."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 100 + index if index < 3 else None
        return 0 if index < 3 else _INVALID

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 102 if name == b"GPU-c" else None
        return 0 if name == b"GPU-c" else _NOT_FOUND

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: Any, *rows: Any) -> int:
        rows[2]._obj.value = int(handle.value == 102)
        return 0


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


def test_a_broken_gpu_of_others_is_no_fault_of_this_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert read_gpus() == [Gpu(), Gpu()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert read_gpus() == [Gpu(remap_pending=True)]
