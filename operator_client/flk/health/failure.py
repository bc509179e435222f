"""Find the failure that led to all others: the cause that is reported for a job."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from flk.observe.needs import killed_pods
from flk.observe.observation import What
from flk.observe.pods import SIGKILLED, one_line
from flk.observe.view import JobView
from flk.units import timestamp
from flk_runtime.contract.failure import ExitCode, Failure, Kind, kind_of_container, root_cause

_CONTAINER_ENDED: Final = re.compile(
    r"Error pod (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL
)
_LAUNCHER_CODES: Final = (ExitCode.USAGE, ExitCode.TRAINING, ExitCode.INFRASTRUCTURE, ExitCode.TIMEOUT)


def root_failure(view: JobView) -> Failure | None:
    """Return the failure that led to all others, None if nothing is known.

    The cause that a launcher has recorded wins over the failures that the containers show. A launcher that only knows
    that the others were lost, or that the connection to them broke, has recorded no cause.
    """
    recorded = [r.failure for r in view.records if r.outcome == "failed" and r.failure]
    shown = [failure for p in view.pods if p.failed_permanently and not p.record and (failure := p.failure)]
    known = [failure for failure in recorded if failure.is_cause]
    found = known or [*recorded, *shown]
    return with_memory_limit(root_cause(found) if found else _failure_in_events(view), view)


def with_memory_limit(failure: Failure | None, view: JobView) -> Failure | None:
    """Return the failure as out of memory if its container was killed at its memory limit.

    No launcher can record that: it is killed with its container, and sees of the others only that they are lost. A
    container whose kill an event or its pod explains was lost; without the pod's events nothing more is known.
    """
    if failure is None:
        return None
    name = view.pod_of(failure)
    since = next((a.started for r in view.records for a in r.attempts if a.number == failure.attempt), 0.0)
    known = failure.kind is Kind.OOM or (
        failure.kind in (Kind.LOST, Kind.CONTAINER_KILLED, Kind.SIGNAL, Kind.KILLED)
        and view.killed_by_memory_limit(name, since)
    )
    # A launcher has seen the end of its ranks itself. An exit code of a rank says nothing about a container.
    of_container = failure.kind is Kind.LOST or (failure.exit_code == SIGKILLED and not _is_recorded(failure, view))
    killed = failure.kind is Kind.CONTAINER_KILLED or (of_container and view.got_sigkill(name, since))
    outside = view.outside_end(name, since, failure.time or math.inf) if killed and not known else ""
    if outside and failure.kind is Kind.CONTAINER_KILLED:
        return replace(failure, kind=Kind.LOST, pod_name=name, message=f"was killed ({one_line(outside)})")
    # Nothing follows from events that nobody has read, or that the API server has forgotten.
    unexplained = killed and not outside and name in killed_pods(view) and view.seen.has_read(What.EVENTS, name)
    if failure.kind is not Kind.OOM and (known or unexplained):
        failure = replace(failure, kind=Kind.OOM, pod_name=name, message="")
    if failure.kind is Kind.OOM and not failure.message:
        limit = view.memory_limit(name)
        message = f"the limit is {limit}; a larger --memory helps" if limit else "a larger --memory helps"
        return replace(failure, message=message if known else f"nothing else explains its SIGKILL; {message}")
    return failure


def _is_recorded(failure: Failure, view: JobView) -> bool:
    return any(failure in (record.failure, *(a.failure for a in record.attempts)) for record in view.records)


def exit_code_of(failure: Failure) -> ExitCode:
    """Return the exit code of a job that this failure has ended."""
    if failure.kind is Kind.EXIT and failure.exit_code in _LAUNCHER_CODES:
        return ExitCode(failure.exit_code)  # a launcher's own code, whose record was lost
    return failure.code


def _failure_in_events(view: JobView) -> Failure | None:
    """Return how a pod ended that does not exist any more: the operator's events outlive it."""
    for event in view.job_events:
        match = _CONTAINER_ENDED.match(str(event.get("message", "")))
        if match and event.get("reason") in ("Error", "OOMKilled"):
            name, code, message = match[1], int(match[2]), match[3].strip()
            index = next((pod.index for pod in view.pods if pod.name == name), 0)
            kind = kind_of_container(event["reason"], code, None)
            last_line = message.splitlines()[-1] if message and not message.startswith("{") else ""
            ended = timestamp(event.get("lastTimestamp"))
            return Failure(kind, index, pod_name=name, time=ended, message=last_line, exit_code=code)
    return None
