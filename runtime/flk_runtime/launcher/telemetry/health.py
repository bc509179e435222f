"""Health of a pod, which its launcher checks before it joins: a broken node then ends no attempt of all pods.

It is checked at the start of the launcher, and after an attempt that a broken node may have ended. It takes
milliseconds on a healthy node. A fault is a failure of kind UNHEALTHY, whose message names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from flk_runtime.contract.failure import BEFORE_FIRST, Failure, Kind
from flk_runtime.launcher.settings import Settings

TIMEOUT: Final = 5.0  # seconds that the check may take; what takes longer does not answer


def check(settings: Settings, attempt: int = BEFORE_FIRST) -> list[Failure]:
    """The fault of this pod or its node, as a failure of ``attempt``, if there is one and the pod is to be checked."""
    if not (settings.health and settings.trains):
        return []
    message = find_fault(settings.gpus, _gpu_faults)
    place = settings.pod, None, settings.pod_name, settings.node
    return [Failure(Kind.UNHEALTHY, *place, attempt, time.time(), message=message)] if message else []


def _gpu_faults(wanted: int) -> Iterable[str]:
    from flk_runtime.launcher.telemetry.usage import find_faults, read_errors  # not every job needs it

    return find_faults(wanted, read_errors())


def find_fault(gpus: int, gpu_faults: Callable[[int], Iterable[str]]) -> str:
    """What is wrong with the GPUs of this pod; empty if nothing is.

    ``gpus`` is how many the pod has requested, of which ``gpu_faults`` yields the faults. A driver that does not answer
    within TIMEOUT is a fault.
    """
    found: list[str] = []
    if not gpus:
        return ""
    thread = threading.Thread(target=lambda: found.extend(gpu_faults(gpus)), name="health", daemon=True)
    thread.start()  # a system call may never return
    thread.join(TIMEOUT)
    if thread.is_alive():
        return f"the driver of the GPUs does not answer for {TIMEOUT:g} s"
    return "; ".join(found)
