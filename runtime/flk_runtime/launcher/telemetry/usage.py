"""What this pod uses of its processors and memory, from its control group (v2), and its GPUs, from NVML.

`Meter` is the thread of a launcher that reads it, and what the GPUs do, at intervals.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract.pod_layout import VISIBLE_GPUS, gpu_names
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.telemetry import GpuUsage, PodUsage
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host

NVML: Final = "libnvidia-ml.so.1"
_GPU_IS_LOST: Final = 15  # NVML_ERROR_GPU_IS_LOST


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
    """The function that reads the GPUs of this container. It finds none where NVML is missing or does not start."""
    nvml = open_nvml()
    return list if nvml is None else partial(read_gpus, nvml)


def read_gpus(nvml: Any) -> list[GpuUsage]:
    """The use of each GPU now, without GPUs that do not answer. Takes long where a driver hangs.

    ``nvml`` is the library, which has been started.
    """
    handles = [handle for handle, error in find_gpus(nvml) or () if not error]
    return [found for handle in handles if (found := _read_gpu(nvml, handle))]


def _read_gpu(nvml: Any, handle: ctypes.c_void_p) -> GpuUsage | None:
    shares = (ctypes.c_uint * 2)()  # nvmlUtilization_t: percent of the time, of kernels and of memory
    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
    if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(shares)) or nvml.nvmlDeviceGetMemoryInfo(
        handle, ctypes.byref(memory)
    ):
        return None
    return GpuUsage(shares[0] / 100, memory[2], memory[0])


def find_faults(wanted: int, errors: list[int] | None) -> Iterator[str]:
    """The faults of the GPUs of a pod that has requested so many, by NVML's ``errors`` (see `read_errors`)."""
    if errors is None:
        return
    if len(errors) < wanted:
        yield f"{plural(len(errors), 'GPU')} of {wanted} can be seen"
    for index, error in enumerate(errors):
        if error == _GPU_IS_LOST:
            yield f"GPU {index} is lost: it has fallen off the bus"
        # NVML_ERROR_NOT_SUPPORTED (3) is an answer of one that has the memory of the host, NVML_ERROR_NO_PERMISSION (4)
        # of one of which the container has a part (MIG).
        elif error not in (0, 3, 4):
            yield f"GPU {index} does not answer (NVML error {error})"


def read_errors() -> list[int] | None:
    """NVML's error for each GPU of this pod, 0 if it answers; None where there is no NVML, or it does not start."""
    nvml = open_nvml()
    if nvml is None:
        return None
    try:
        gpus = find_gpus(nvml)
        if gpus is None:
            return None
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: asks the GPU itself
        return [error or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) for handle, error in gpus]
    finally:
        nvml.nvmlShutdown()


INTERVAL: Final = 10.0  # seconds between two readings
_NAMED: Final = re.compile(r"^(\w+)[ \t]+(\d+)", re.MULTILINE)  # a line of cpu.stat and memory.stat


@dataclass(frozen=True)
class Counters:
    """Readings at one moment. Counters grow from the start of the container; None: it cannot be read here."""

    cpu_seconds: float | None = None
    cpu_limit: float | None = None  # processors that it may use
    memory: int | None = None  # bytes that count against the limit: without files that the kernel may drop
    memory_limit: int | None = None


def read(group: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Counters:
    """The readings of this container, which takes less than a millisecond. Without control groups v2 they lack most."""
    used = _named(group / "cpu.stat").get("usage_usec")
    meminfo = proc / "meminfo"
    return Counters(
        None if used is None else used / 1e6,
        host.cpu_limit(group) or float(host.cpu_count()),
        _memory(group),
        host.memory_limit(group, meminfo) if meminfo.exists() else None,
    )


class Meter:
    """What this pod uses. The thread reads it, since a driver of GPUs that hangs must not stop the launcher."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._before: tuple[float, Counters] | None = None
        self.latest: PodUsage | None = None
        """The latest reading; None: there is none yet."""

    def start(self) -> None:
        """Start to read."""
        threading.Thread(target=self._run, name="telemetry", daemon=True).start()

    def measure(self, now: float, moment: float, counters: Counters, gpus: list[GpuUsage]) -> None:
        """Take a reading at ``now``, by a clock that only grows, and at ``moment`` in seconds since the epoch."""
        since, before = self._before or (now, counters)
        self._before = now, counters

        first, last = before.cpu_seconds, counters.cpu_seconds
        cpu = None
        if first is not None and last is not None and now > since:
            cpu = round(max(0.0, last - first) / (now - since), 3)
        self.latest = PodUsage(
            self._settings.pod,
            self._settings.pod_name,
            self._settings.node,
            time=round(moment, 3),
            cpu=cpu,
            cpu_limit=counters.cpu_limit,
            memory=counters.memory,
            memory_limit=counters.memory_limit,
            gpus=gpus,
        )

    def _run(self) -> None:
        gpus_now = open_gpus() if self._settings.gpus else list
        pause = 1.0  # a rate needs two readings
        while True:
            self.measure(time.monotonic(), time.time(), read(), gpus_now())
            time.sleep(pause)
            pause = INTERVAL


def _memory(group: Path) -> int | None:
    """Bytes that count against the limit, without files that the kernel may drop."""
    count, dropped = _number(group / "memory.current"), _named(group / "memory.stat").get("inactive_file", 0)
    return None if count is None else max(0, count - dropped)


def _named(path: Path) -> Mapping[str, int]:
    return {name: int(value) for name, value in _NAMED.findall(_text(path) or "")}


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text()
    return None
