"""Find the first exception in the logs of pods that flk's launcher did not start: torchrun, plain python, Lightning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flk.health.exceptions import LoggedError, find_errors
from flk.observe.model import PodState
from flk.observe.view import JobView
from flk_runtime.contract.failure import Failure, Kind, kind_of_loss

_RANK: Final = re.compile(r"\[(?:rank|default)(\d+)\]")
# With these a launcher reports the end of its children; the log of the children has the cause.
_LAUNCHERS: Final = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
# A rank whose peer has ended raises one of these, if the script talks to the peer without torch.
_BROKEN: Final = ("ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError")


def first_exception(view: JobView) -> Failure | None:
    """Return the first exception in the logs that is not a consequence of another rank's end, None if there is none.

    Pods are taken in the order in which they ended, because the logs carry no times.
    """
    pods = {pod.name: pod for pod in view.pods}
    ordered = [pods[name] for name in view.seen.logs if name in pods]
    ordered.sort(key=lambda pod: (pod.ended is None, pod.ended or 0.0))
    found = [failure for pod in ordered for failure in exceptions(view.seen.logs[pod.name], pod)]
    return min(found, key=lambda failure: failure.secondary, default=None)  # the first of the primary ones, if any


def exceptions(lines: Sequence[str], pod: PodState) -> list[Failure]:
    """Return the exceptions in the log of a pod, in their order."""
    return [_failure(error, lines, pod) for error in find_errors(lines) if error.type]


def _failure(error: LoggedError, lines: Sequence[str], pod: PodState) -> Failure:
    rank = _RANK.match(lines[error.begin])
    if error.secondary:
        kind = kind_of_loss(error.message)
    else:
        kind = Kind.PEER if error.type in (*_LAUNCHERS, *_BROKEN) else Kind.EXCEPTION
    return Failure(
        kind,
        pod.index,
        int(rank[1]) if rank else pod.ranks[0] if len(pod.ranks) == 1 else None,
        pod.name,
        pod.node,
        time=pod.ended or 0.0,
        type=error.type,
        message=error.message,
        traceback="\n".join(lines[error.begin : error.end]),
        exit_code=pod.exit_code,
    )
