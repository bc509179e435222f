"""What NVML says about GPUs, with a library that answers as the recorded one did."""

from __future__ import annotations

from typing import Any

from flk_runtime.contract.telemetry import GpuUsage
from flk_runtime.launcher.telemetry import gpus as nvml
from flk_runtime.launcher.telemetry.gpus import open_gpus, read

_UNKNOWN = 999  # NVML_ERROR_UNKNOWN


class Nvml:
    """NVML of a node with two GPUs, of which the second one does not answer."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, shares: Any) -> int:
        if handle.value == 2:
            return _UNKNOWN
        shares._obj[0], shares._obj[1] = 97, 40
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj[0], memory._obj[1], memory._obj[2] = 85520809984, 80000000000, 5520809984
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, milliwatts: Any) -> int:
        milliwatts._obj.value = 312500
        return 0

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, celsius: Any) -> int:
        return _UNKNOWN


def test_a_gpu_that_answers_is_read_and_another_one_left_out() -> None:
    assert read(Nvml()) == [GpuUsage(0.97, 5520809984, 85520809984, 312.5, None)]


def test_there_are_none_without_the_library(monkeypatch: Any) -> None:
    monkeypatch.setattr(nvml, "NVML", "libno-such-library.so.1")
    assert open_gpus()() == []
