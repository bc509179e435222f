"""What the GPUs of this container do, as NVML tells it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flk_runtime.contract.telemetry import GpuUsage
from flk_runtime.launcher.nvml import find_gpus, open_nvml

_TEMPERATURE_GPU: Final = 0  # NVML_TEMPERATURE_GPU


def open_gpus() -> Callable[[], list[GpuUsage]]:
    """What reads the GPUs of this container; it finds none where there is no NVML, or it does not start."""
    nvml = open_nvml()
    return list if nvml is None else partial(read, nvml)


def read(nvml: Any) -> list[GpuUsage]:
    """What each GPU does now. A GPU that does not answer is left out. It may take long where a driver hangs.

    ``nvml`` is the library, which has been started.
    """
    handles = [handle for handle, error in find_gpus(nvml) or () if not error]
    return [found for handle in handles if (found := _read(nvml, handle))]


def _read(nvml: Any, handle: ctypes.c_void_p) -> GpuUsage | None:
    shares = (ctypes.c_uint * 2)()  # nvmlUtilization_t: percent of the time, of kernels and of memory
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(shares)) or nvml.nvmlDeviceGetMemoryInfo(
        handle, ctypes.byref(memory)
    ):
        return None
    milliwatts, celsius = ctypes.c_uint(), ctypes.c_uint()
    no_power = nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
    no_heat = nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU, ctypes.byref(celsius))
    return GpuUsage(
        shares[0] / 100,
        memory[2],
        memory[0],
        None if no_power else milliwatts.value / 1000,
        None if no_heat else float(celsius.value),
    )
