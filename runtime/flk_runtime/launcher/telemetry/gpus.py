"""The GPUs of this container: NVML, the library of NVIDIA's driver that tells about them, and what they do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from flk_runtime.contract.platform import VISIBLE_GPUS, gpu_names
from flk_runtime.contract.telemetry import GpuUsage

NVML: Final = "libnvidia-ml.so.1"
_TEMPERATURE_GPU: Final = 0  # NVML_TEMPERATURE_GPU


def open_nvml() -> ctypes.CDLL | None:
    """The library, started; None where there is none, or it does not start. Who gets it calls nvmlShutdown at last."""
    try:
        nvml = ctypes.CDLL(NVML)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def find_gpus(nvml: Any, environ: Mapping[str, str] = os.environ) -> list[tuple[ctypes.c_void_p, int]] | None:
    """The handle of each GPU that the ranks may use, and NVML's error where there is none; None: NVML does not tell.

    CUDA_VISIBLE_DEVICES names them by number or by UUID. Where it is not set, they are all.
    """
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    visible = environ.get(VISIBLE_GPUS)  # NVML shows the others too
    names = [str(index) for index in range(count.value)] if visible is None else gpu_names(visible)
    found = []
    for name in names:
        handle = ctypes.c_void_p()
        if name.isdecimal():
            error = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
        else:
            error = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        found.append((handle, int(error)))
    return found


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
