"""Failures as data: how a rank failed, the root cause of several failures, the restarts left, and the job's record."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flk_runtime import contract
from flk_runtime.contract import Attempt, ExitCode, Failure, JobRecord

_HISTORY_LIMIT = 20  # attempts that are kept
_MESSAGE_LIMIT = 300  # characters that are kept of the messages of former attempts
_FINAL_KINDS = ("deadline", "usage")  # would happen again in the next attempt
_REPORTED_FIELDS = ("kind", "type", "message", "traceback", "time", "secondary")


def from_report(failure: Failure, report: bytes) -> Failure | None:
    """``failure`` with the fields of a rank's report (see `flk_runtime.system.report`); None if it cannot be parsed."""
    try:
        reported = json.loads(report)
        fields = {name: reported[name] for name in _REPORTED_FIELDS if name in reported}
    except (ValueError, TypeError):
        return None
    if fields.get("kind") == "exit":
        fields["exit_code"] = 1
    return replace(failure, **fields)


def from_exit_code(failure: Failure, code: int, *, oom: bool) -> Failure:
    """``failure`` with the exit code of the rank's process, negative for a signal.

    ``oom`` says whether the kernel has killed a process of this pod at its memory limit. SIGABRT counts as secondary,
    because NCCL's watchdog aborts the process when a peer is gone.
    """
    if code > 0:
        return replace(failure, kind="exit", exit_code=code)
    kind = "oom" if oom and code == -signal.SIGKILL else "signal"
    return replace(failure, kind=kind, signal=-code, secondary=code == -signal.SIGABRT)


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that led to the others: the earliest one that is not secondary, else the earliest."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time))


def restarts_used(history: Sequence[Attempt]) -> int:
    """Number of failed attempts. It is derived from the last number, because the history may have been shortened."""
    return history[-1].number + (history[-1].failure is not None) if history else 0


def may_restart(history: Sequence[Attempt], restarts: int) -> bool:
    """Return whether an attempt may follow this history in a job that may restart ``restarts`` times."""
    if not history:
        return True
    failure = history[-1].failure
    return restarts_used(history) <= restarts and not (failure and failure.kind in _FINAL_KINDS)


def progress(history: Sequence[Attempt]) -> tuple[int, bool]:
    """Sort key of histories of one job: the one that knows more is greater."""
    return (history[-1].number, history[-1].ended is not None) if history else (-1, False)


def shorten(history: Sequence[Attempt]) -> list[Attempt]:
    """The latest attempts without tracebacks and long messages, so that the size stays bounded."""
    return [
        replace(
            attempt,
            failure=attempt.failure
            and replace(attempt.failure, traceback="", message=attempt.failure.message[:_MESSAGE_LIMIT]),
        )
        for attempt in history[-_HISTORY_LIMIT:]
    ]


def job_record(failure: Failure | None, history: Sequence[Attempt], restarts: int) -> JobRecord:
    """The record of a job that has ended with this failure, or with success (None)."""
    outcome, code = ("failed", failure.code) if failure else ("succeeded", ExitCode.DONE)
    return JobRecord(outcome, int(code), restarts, failure, shorten(history))


def write_termination_message(path: str, record: JobRecord) -> None:
    """Write the record to the pod's termination message, which outlives its log. Nothing happens without a path."""
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(record.to_json(contract.TERMINATION_LOG_LIMIT))
