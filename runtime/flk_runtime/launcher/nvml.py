"""NVML, the library of NVIDIA's driver that tells about the GPUs of a container."""

from __future__ import annotations

import ctypes
from typing import Final

NVML: Final = "libnvidia-ml.so.1"


def open_nvml() -> ctypes.CDLL | None:
    """The library, started; None where there is none, or it does not start. Who gets it calls nvmlShutdown at last."""
    try:
        nvml = ctypes.CDLL(NVML)
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None
