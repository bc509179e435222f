"""The history of a job's attempts, and the job record that is made of the history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import ArchivedRecord, Attempt, JobRecord, QuarantinedNode
from flk_runtime.launcher.settings import Limits

_HISTORY_LIMIT = 20  # attempts that are kept
_MESSAGE_LIMIT = 300  # characters that are kept of the messages of former attempts
_REPEATEDLY = 2  # attempts that a pod on the same node has ended


def quarantine(history: Sequence[Attempt], memory: float) -> list[QuarantinedNode]:
    """The nodes on which pods have failed repeatedly, for a reason that may be the node's, or that are unhealthy.

    What happened more than ``memory`` seconds before the latest attempt is forgotten.
    """
    since = _latest_time(history[-1]) - memory if history and memory else math.inf
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    found: dict[str, QuarantinedNode] = {}
    for attempt in reversed(history):
        failure, time = attempt.failure, _latest_time(attempt)
        if failure and failure.node and failure.kind.meaning.node_at_fault and time >= since:
            node = failure.node
            reasons.setdefault(node, failure.summary)
            counts[node] += _REPEATEDLY if failure.kind.meaning.node_unfit else 1
            if counts[node] >= _REPEATEDLY:
                until = time + memory if memory < math.inf else 0.0
                found.setdefault(node, QuarantinedNode(node, reasons[node], until))
    return [found[node] for node in sorted(found)]


def _latest_time(attempt: Attempt) -> float:
    return attempt.ended or attempt.started


def progress(history: Sequence[Attempt]) -> tuple[int, bool]:
    """Sort key of histories of one job: the history with more knowledge is greater."""
    return (history[-1].number, history[-1].ended is not None) if history else (-1, False)


def shorten(history: Sequence[Attempt]) -> list[Attempt]:
    """The latest attempts without tracebacks and long messages, so that the size stays bounded."""
    return [
        replace(
            attempt,
            failure=attempt.failure
            and replace(attempt.failure, traceback="", stderr="", message=attempt.failure.message[:_MESSAGE_LIMIT]),
        )
        for attempt in history[-_HISTORY_LIMIT:]
    ]


def former_attempts(entry: ArchivedRecord, pod_name: str, start: float) -> list[Attempt]:
    """The attempts of a job whose launchers were all killed or told to end; empty if the job begins anew.

    ``entry`` is the record that they had kept, and ``pod_name`` the name of pod 0. Its step is the last that was kept.
    If all launchers ended by SIGTERM, the old history goes on only when nobody has started the job again since
    ``start``, which is when it was started or resumed; 0: not known.
    """
    record = entry.record
    told = record.outcome == "preempted" and start and entry.start == start
    if not record.attempts or not (told or record.outcome == "running"):
        return []
    *others, last = record.attempts
    ended = max(entry.updated, last.started)
    failure = Failure(Kind.CONTAINER_KILLED, 0, pod_name=pod_name, attempt=last.number, time=ended)
    if told:
        failure = record.failure or replace(failure, kind=Kind.PREEMPTED)
    step = entry.step if entry.step is not None else last.restored
    return [*others, replace(last, ended=ended, failure=failure, step=step)]


def job_record(
    failure: Failure | None, history: Sequence[Attempt], limits: Limits, no_retry_reason: str = ""
) -> JobRecord:
    """The record of a job that has ended with this failure, or with success (None)."""
    outcome, code = ("failed", failure.code) if failure else ("succeeded", ExitCode.DONE)
    return new_record(outcome, int(code), failure, history, limits, no_retry_reason)


def new_record(
    outcome: str,
    code: int,
    failure: Failure | None,
    history: Sequence[Attempt],
    limits: Limits,
    no_retry_reason: str = "",
) -> JobRecord:
    """The job record, with the restarts and disruptions that the history has used of the limits."""
    last = history[-1] if history else None
    return JobRecord(
        outcome,
        int(code),
        limits.restarts,
        failure,
        shorten(history),
        limits.disruptions,
        last.restarts if last else 0,
        last.disruptions if last else 0,
        no_retry_reason,
        quarantine=quarantine(history, limits.node_memory),
    )
