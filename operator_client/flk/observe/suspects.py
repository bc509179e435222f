"""Suspects: the nodes that may be at fault for what a job's pods do, or for how they ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.observe.model import PodPhase
from flk.observe.pods import SIGKILLED
from flk.observe.view import JobView
from flk_runtime.contract.failure import Failure, Kind

# Words of exceptions. Errors of CUDA that name a mistake of the script are left out.
_WORDS: Final = re.compile(
    r"(CUDA|HIP) error(?!: (device-side assert|out of memory|invalid))|NCCL|RCCL|cuDNN|CUBLAS|NVML|uncorrectable|"
    r"Errno 5\b|Input/output error|Errno 30\b|Read-only file system"
)


EVENTS_KEPT: Final = 3600.0  # seconds for which API servers keep events by default


def may_be_of_hardware(failure: Failure | None) -> bool:
    """Return whether a node or a device may have caused a failure, and not only the script."""
    if failure is None:
        return False
    text = f"{failure.type}: {failure.message}"
    return failure.kind.may_be_of_hardware or (failure.kind is Kind.EXCEPTION and bool(_WORDS.search(text)))


def suspects(view: JobView) -> dict[str, str]:
    """Return the names of the nodes that may be at fault, each with the name of a pod there."""
    return {node: pod for pod, node in _places(view) if node}


def killed_pods(view: JobView) -> list[str]:
    """Return the pods that SIGKILL has ended lately, the last one last: their events may say who has sent it.

    An event that the API server has forgotten says nothing, and neither does its absence.
    """
    failures = [record.failure for record in view.records]
    failures += [attempt.failure for record in view.records for attempt in record.attempts]
    failures += [pod.failure for pod in view.pods]
    ends = {
        view.pod_of(failure): failure.time
        for failure in failures
        if failure is not None and view.now - failure.time < EVENTS_KEPT and _got_sigkill(view, failure)
    }
    return sorted(filter(None, ends), key=lambda name: ends[name])


def _got_sigkill(view: JobView, failure: Failure) -> bool:
    is_killed = failure.kind is Kind.CONTAINER_KILLED or failure.exit_code == SIGKILLED
    return is_killed or view.got_sigkill(view.pod_of(failure), 0.0)


def _places(view: JobView) -> Iterator[tuple[str, str]]:
    nodes = {pod.name: pod.node for pod in view.pods}
    failures = [record.failure for record in view.records if view.failed]
    failures += [pod.failure for pod in view.pods if pod.failed_permanently and not pod.record]
    if view.record and not view.failed:
        failures += [attempt.failure for attempt in view.record.attempts[-1:]]
    for failure in failures:
        if failure is not None and may_be_of_hardware(failure):
            name = view.pod_of(failure)
            yield name, failure.node or nodes.get(name, "")
    for pod in view.pods:
        if pod.phase == PodPhase.UNKNOWN or (pod.phase == PodPhase.STARTING and not pod.reason):
            yield pod.name, pod.node
