"""Find the errors in the lines of one rank or one process: Python's tracebacks, and the last words of native code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk.observe.model import PodState
from flk.observe.view import JobView
from flk_runtime.contract.failure import Failure, Kind, kind_of_loss, kind_of_text

# torch puts the rank before each line of a traceback that ends a process.
_PREFIX: Final = re.compile(r"\[rank\d+\]: ?")
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_EXCEPTION: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?")
_NATIVE: Final = re.compile(
    r"(?P<type>Fatal Python error|terminate called after throwing an instance of|Segmentation fault|Bus error|"
    r"Illegal instruction|Aborted)\b:? ?(?P<message>.*)"
)


@dataclass(frozen=True)
class LoggedError:
    """An error in a log. ``begin`` and ``end`` are the indexes of its first line and of the line after its last."""

    begin: int
    end: int
    type: str  # class name of the exception, or the kind of a native error
    message: str
    secondary: bool  # a consequence of a peer's end: the connection to it broke

    @property
    def summary(self) -> str:
        """Type and message in one line."""
        return f"{self.type}: {self.message}" if self.message else self.type


def find_errors(lines: Sequence[str]) -> list[LoggedError]:
    """Return the errors in the lines of one process, in their order. Chained exceptions are one error: the last."""
    errors: list[LoggedError] = []
    chained = False  # the next traceback belongs to the last error
    texts = [_PREFIX.sub("", line, count=1) if line.startswith("[rank") else line for line in lines]
    position = 0
    while position < len(texts):
        text = texts[position]
        error = None
        if text.lstrip(" |+-") == _TRACEBACK:
            error = _traceback(texts, position)
        elif not text.startswith((" ", "\t")) and (match := _NATIVE.match(text)):
            secondary = kind_of_text("", match["message"]).meaning.secondary
            error = LoggedError(position, position + 1, match["type"], match["message"].strip(), secondary)
        if error is None:
            chained = chained or text.strip() in _CHAINED
            position += 1
            continue
        if chained and errors:
            first = errors.pop()
            error = replace(error, begin=first.begin, secondary=first.secondary or error.secondary)
        errors.append(error)
        chained = False
        position = error.end
    return errors


def _traceback(texts: Sequence[str], begin: int) -> LoggedError | None:
    """Return the error whose traceback begins at an index; None if the log ends in the middle of it."""
    indent = len(texts[begin]) - len(texts[begin].lstrip(" "))
    for position, text in _following(texts, begin):
        if text[:indent].strip() == "" and not text[indent : indent + 1].isspace() and text.strip():
            match = _EXCEPTION.match(text[indent:])
            if match is None:
                return None
            name, message = match["type"].rpartition(".")[2], match["message"] or ""
            secondary = kind_of_text(name, message).meaning.secondary
            return LoggedError(begin, position + 1, name, message.strip(), secondary)
    return None


def _following(texts: Sequence[str], begin: int) -> Iterator[tuple[int, str]]:
    return ((position, texts[position]) for position in range(begin + 1, len(texts)))


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
