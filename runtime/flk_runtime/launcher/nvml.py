"""NVML, the library of NVIDIA's driver that tells about the GPUs of a container."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any, Final

from flk_runtime.contract.platform import VISIBLE_GPUS, gpu_names

NVML: Final = "libnvidia-ml.so.1"


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
