"""Failures as data: how a rank failed, the root cause of several failures, and the job's record."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.failure import Failure, is_secondary
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.launcher.policy import Limits
from flk_runtime.system.text import last_exception

_HISTORY_LIMIT = 20  # attempts that are kept
_MESSAGE_LIMIT = 300  # characters that are kept of the messages of former attempts
# Kinds in the order in which they count as the cause, whatever the clocks of the nodes say.
_CAUSES = {
    **dict.fromkeys(("usage", "deadline", "hang"), 0),
    **dict.fromkeys(("exception", "io", "disk_full", "gpu", "address"), 1),
    **dict.fromkeys(("oom", "signal"), 2),
    "exit": 3,
    **dict.fromkeys(("preempted", "lost", "unkillable"), 4),
    "resized": 4.2,
    "rendezvous": 4.5,  # a rank that failed earlier could not be met
}
_EXIT_0 = 5  # a rank that succeeded is the cause only if nothing else is: the others may have had little left to do
_TIMED_OUT = 6  # a collective that timed out; where several did, none is known to be the first
_SECONDARY = 7
_NODE_KINDS = ("lost", "gpu", "unkillable", "io", "hang")  # kinds of failures that may be the fault of a node
_REPEATEDLY = 2  # attempts that a pod on the same node has ended
_STDERR_LINES = 20  # that are kept
# In what faulthandler writes: frames that started the script, and a list of all extension modules.
_NOISE = re.compile(
    r'\s*$|Extension modules: |  File ".*flk_runtime/(launcher/\w+|__main__)\.py"|  File "<frozen runpy>"'
)
# Lines on stderr of a process that a signal has ended, from the most to the least telling: of std::terminate, of Python
# or the C library before they abort (not faulthandler's name of the signal), and the innermost frame.
_LAST_WORDS = (
    re.compile(r"\s*what\(\): "),
    re.compile(r"Fatal Python error: (?!Aborted|Segmentation fault|Bus error|Floating point|Illegal instruction)"),
    re.compile(r".*: Assertion .* failed\.|\*\*\* .+ \*\*\*: terminated"),
    re.compile(r"(double free or corruption|corrupted |(free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): )"),
    re.compile(r'  File ".+", line \d+ in '),
)
_TRAILING_LINES = 2  # that may follow the traceback which ended a process
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_REPORTED_FIELDS = ("kind", "type", "message", "traceback", "time", "secondary")


def from_report(failure: Failure, report: bytes) -> Failure | None:
    """``failure`` with the fields of a rank's report (`flk_runtime.shared.failure_report`); None if it is no report."""
    try:
        reported = json.loads(report)
        fields = {name: reported[name] for name in _REPORTED_FIELDS if name in reported}
    except (ValueError, TypeError):
        return None
    if fields.get("kind") == "exit":
        fields["exit_code"] = 1
    return replace(failure, **fields)


def from_exit_code(failure: Failure, code: int, stderr: str, *, oom: bool) -> Failure:
    """``failure`` with the exit code of the rank's process, negative for a signal, and its last 20 lines on stderr.

    ``oom`` says whether the kernel has killed a process of this pod at its memory limit. SIGABRT is secondary if the
    last lines say that the connection to a peer broke: NCCL's watchdog then aborts the process.
    """
    lines = [line for line in stderr.splitlines() if not _NOISE.match(line)][-_STDERR_LINES:]
    failure = replace(failure, stderr="\n".join(lines))
    if code >= 0:
        ended = last_exception("\n".join(lines)) if code else ""
        message = ended if ended in lines[-1 - _TRAILING_LINES :] else ""
        return replace(failure, kind="exit", exit_code=code, message=message)
    kind = "oom" if oom and code == -signal.SIGKILL else "signal"
    secondary = code == -signal.SIGABRT and is_secondary("", stderr)
    words = [
        line.strip().removeprefix("what():").strip() for words in _LAST_WORDS for line in lines if words.match(line)
    ]
    return replace(failure, kind=kind, signal=-code, secondary=secondary, message=words[0] if words else "")


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that led to the others, with the number of ranks that failed in the same way.

    An exception counts before a signal, a signal before an exit code, and that before a lost pod. A secondary failure
    is chosen only if there is no other, a timeout before a broken connection: the rank that gives up closes its
    connections. Among failures of one kind the earliest is chosen.
    """
    cause = min(failures, key=lambda failure: (_precedence(failure), failure.time))
    same = {failure.rank for failure in failures if _signature(failure) == _signature(cause)}
    return replace(cause, count=max(cause.count, len(same)))


def _precedence(failure: Failure) -> float:
    if failure.secondary:
        text = failure.message.lower()
        return _TIMED_OUT if "timed out" in text or "timeout" in text else _SECONDARY
    if failure.exit_code == 0:
        return _EXIT_0
    return _CAUSES[failure.kind]


def _signature(failure: Failure) -> tuple[object, ...]:
    """What equal failures of several ranks have in common; process ids, ports and addresses may differ."""
    if failure.kind == "lost":
        return ("lost", failure.pod)
    return failure.kind, failure.type, _NUMBER.sub("", failure.message), failure.exit_code, failure.signal


def bad_nodes(history: Sequence[Attempt]) -> list[str]:
    """The nodes on which pods have failed repeatedly, for a reason that may be the node's."""
    counts = Counter(each.failure.node for each in history if each.failure and each.failure.kind in _NODE_KINDS)
    return sorted(node for node, count in counts.items() if node and count >= _REPEATEDLY)


def progress(history: Sequence[Attempt]) -> tuple[int, bool]:
    """Sort key of histories of one job: the one that knows more is greater."""
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


def job_record(failure: Failure | None, history: Sequence[Attempt], limits: Limits, verdict: str = "") -> JobRecord:
    """The record of a job that has ended with this failure, or with success (None); ``verdict`` as in `Decision`."""
    outcome, code = ("failed", failure.code) if failure else ("succeeded", ExitCode.DONE)
    return new_record(outcome, int(code), failure, history, limits, verdict)


def new_record(
    outcome: str,
    code: int,
    failure: Failure | None,
    history: Sequence[Attempt],
    limits: Limits,
    verdict: str = "",
) -> JobRecord:
    """The job record with what the history has used of the limits."""
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
        verdict,
        bad_nodes=bad_nodes(history),
    )
