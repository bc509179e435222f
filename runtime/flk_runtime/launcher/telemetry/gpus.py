"""The GPUs of this container: what they do and whether they are healthy, as NVIDIA's driver (NVML) tells it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from flk_runtime.contract.pod_layout import VISIBLE_GPUS, gpu_names
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.telemetry import GpuUsage

NVML: Final = "libnvidia-ml.so.1"
_GPU_IS_LOST: Final = 15  # NVML_ERROR_GPU_IS_LOST
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


@dataclass(frozen=True)
class Health:
    """What NVML says about the health of one GPU."""

    lost: bool = False  # it has fallen off the bus
    error: int = 0  # of NVML, when it asked for the GPU
    remap_pending: bool = False  # a row of its memory had uncorrectable errors, and a reset has to replace it
    remap_failed: bool = False  # a row could not be replaced


def find_faults(wanted: int, gpus: list[Health] | None) -> Iterator[str]:
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


def read_health() -> list[Health] | None:
    """What NVML says about the GPUs of this pod; None where there is no NVML, or it does not start."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        found = find_gpus(nvml)
        if found is None:
            return None
        return [_read_health(nvml, handle, error) for handle, error in found]
    finally:
        nvml.nvmlShutdown()


def _read_health(nvml: ctypes.CDLL, handle: ctypes.c_void_p, error: int) -> Health:
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: asks the GPU itself
    error = error or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if error:
        return Health(lost=error == _GPU_IS_LOST, error=error)
    rows = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
    with contextlib.suppress(AttributeError):  # a driver before 450
        nvml.nvmlDeviceGetRemappedRows(handle, *map(ctypes.byref, rows))  # GPUs before A100 have none: all stay 0
    return Health(remap_pending=bool(rows[2].value), remap_failed=bool(rows[3].value))
