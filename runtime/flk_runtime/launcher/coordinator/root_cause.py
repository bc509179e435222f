"""The root cause of the failures of an attempt: the one that led to the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from flk_runtime.contract.failure import Failure

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
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


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
