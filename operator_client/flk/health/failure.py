"""Find the failure that led to all others: the cause that is reported for a job."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from flk.observe.pods import SIGKILLED
from flk.observe.view import JobView
from flk.units import timestamp
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.failure import Failure

_CONTAINER_ENDED: Final = re.compile(
    r"Error pod (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL
)
_LAUNCHER_CODES: Final = (ExitCode.USAGE, ExitCode.TRAINING, ExitCode.INFRASTRUCTURE, ExitCode.TIMEOUT)


def root_failure(view: JobView) -> Failure | None:
    """Return the failure that led to all others, None if nothing is known.

    A launcher's record counts before what the containers show, and a connection that broke because a peer had failed
    never counts.
    """
    recorded = [r.failure for r in view.records if r.outcome == "failed" and r.failure]
    shown = [failure for p in view.pods if p.failed_permanently and not p.record and (failure := p.failure)]
    # A launcher that lost the others knows only that they were lost; one of them may know why.
    found = min(
        [*recorded, *shown], key=lambda f: (f.secondary, f.kind == "lost", f not in recorded, f.time), default=None
    )
    return with_memory_limit(found or _failure_in_events(view), view)


def with_memory_limit(failure: Failure | None, view: JobView) -> Failure | None:
    """Return the failure as out of memory if the kernel has killed the launcher too, so that no record says so."""
    if failure is None:
        return None
    name = failure.pod_name or next((pod.name for pod in view.pods if pod.index == failure.pod), "")
    since = next((a.started for r in view.records for a in r.attempts if a.number == failure.attempt), 0.0)
    known = failure.kind == "oom" or (failure.kind in ("lost", "signal") and view.killed_by_memory_limit(name, since))
    # What a launcher has seen of a rank it knows by itself, and an exit code of a rank says nothing of a container.
    of_container = failure.kind == "lost" or (failure.exit_code == SIGKILLED and not _is_recorded(failure, view))
    if failure.kind != "oom" and (known or (of_container and view.killed_without_reason(name, since))):
        failure = replace(failure, kind="oom", pod_name=name, message="")
    if failure.kind == "oom" and not failure.message:
        limit = view.memory_limit(name)
        message = f"the limit is {limit}; a larger --memory helps" if limit else "a larger --memory helps"
        return replace(failure, message=message if known else f"nothing else explains its SIGKILL; {message}")
    return failure


def _is_recorded(failure: Failure, view: JobView) -> bool:
    return any(failure in (record.failure, *(a.failure for a in record.attempts)) for record in view.records)


def exit_code_of(failure: Failure) -> ExitCode:
    """Return the exit code of a job that this failure has ended."""
    if failure.kind == "exit" and failure.exit_code in _LAUNCHER_CODES:
        return ExitCode(failure.exit_code)  # a launcher's own code, whose record was lost
    return failure.code


def _failure_in_events(view: JobView) -> Failure | None:
    """Return how a pod ended that does not exist any more: the operator's events outlive it."""
    for event in view.job_events:
        match = _CONTAINER_ENDED.match(str(event.get("message", "")))
        if match and event.get("reason") in ("Error", "OOMKilled"):
            name, code, message = match[1], int(match[2]), match[3].strip()
            index = next((pod.index for pod in view.pods if pod.name == name), 0)
            kind = "oom" if event["reason"] == "OOMKilled" else "exit"
            last_line = message.splitlines()[-1] if message and not message.startswith("{") else ""
            ended = timestamp(event.get("lastTimestamp"))
            return Failure(kind, index, pod_name=name, time=ended, message=last_line, exit_code=code)
    return None
