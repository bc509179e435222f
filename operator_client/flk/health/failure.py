"""The failure that led to all others, in records, events and logs, and attempts that end without progress."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

from flk.health.cause import Cause, Found
from flk.observe.model import Evidence, PodState
from flk.observe.needs import killed_pods
from flk.observe.observation import What
from flk.observe.pods import OF_INIT, SIGKILLED, one_line
from flk.observe.view import JobView
from flk.spec.units import timestamp
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import (
    Failure,
    Kind,
    kind_of_container,
    kind_of_loss,
    kind_of_text,
    root_cause,
)
from flk_runtime.contract.quantities import numbered, plural
from flk_runtime.contract.record import Attempt
from flk_runtime.contract.values import dataclass, replace

_CONTAINER_ENDED: Final = r"(?s)Error pod (\S+) container \S+ exitCode: (\d+) terminated message: (.*)"
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
    is_recorded = any(failure in (record.failure, *(a.failure for a in record.attempts)) for record in view.records)
    of_container = failure.kind is Kind.LOST or (failure.exit_code == SIGKILLED and not is_recorded)
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


def exit_code_of(failure: Failure) -> ExitCode:
    """Return the exit code of a job that this failure has ended."""
    if failure.kind is Kind.EXIT and failure.exit_code in _LAUNCHER_CODES and not failure.message.startswith(OF_INIT):
        return ExitCode(failure.exit_code)  # a launcher's own code, whose record was lost
    return failure.code


def _failure_in_events(view: JobView) -> Failure | None:
    """Return how a pod ended that does not exist any more: the operator's events outlive it."""
    for event in view.job_events:
        match = re.match(_CONTAINER_ENDED, str(event.get("message", "")))
        if match and event.get("reason") in ("Error", "OOMKilled"):
            name, code, message = match[1], int(match[2]), match[3].strip()
            index = next((pod.index for pod in view.pods if pod.name == name), 0)
            kind = kind_of_container(event["reason"], code, None)
            last_line = message.splitlines()[-1] if message and not message.startswith("{") else ""
            ended = timestamp(event.get("lastTimestamp"))
            return Failure(kind, index, pod_name=name, time=ended, message=last_line, exit_code=code)
    return None


# torch puts the rank before each line of a traceback that ends a process.
_TRACEBACK: Final = "Traceback (most recent call last):"
_CHAINED: Final = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_EXCEPTION: Final = r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?"
_NATIVE: Final = (
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
    texts = [re.sub(r"\[rank\d+\]: ?", "", line, count=1) if line.startswith("[rank") else line for line in lines]
    position = 0
    while position < len(texts):
        text = texts[position]
        error = None
        if text.lstrip(" |+-") == _TRACEBACK:
            error = _traceback(texts, position)
        elif not text.startswith((" ", "\t")) and (match := re.match(_NATIVE, text)):
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
    for position, text in enumerate(texts[begin + 1 :], begin + 1):
        if text[:indent].strip() == "" and not text[indent : indent + 1].isspace() and text.strip():
            match = re.match(_EXCEPTION, text[indent:])
            if match is None:
                return None
            name, message = match["type"].rpartition(".")[2], match["message"] or ""
            secondary = kind_of_text(name, message).meaning.secondary
            return LoggedError(begin, position + 1, name, message.strip(), secondary)
    return None


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
    rank = re.match(r"\[(?:rank|default)(\d+)\]", lines[error.begin])
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


FRUITLESS: Final = 3  # attempts in a row without a further step before flk says so
SHORT: Final = 120.0  # seconds: a longer attempt of a script that tells no steps may have made some


def _no_progress(view: JobView) -> Found | None:
    if view.record is None or view.failed or view.suspended:
        return None
    fruitless, step = _fruitless(view, view.record.attempts)
    if len(fruitless) < FRUITLESS:
        return None
    failure = fruitless[-1][1]
    told = [
        Evidence(f"record of the launchers: attempt {attempt.number + 1}", each.summary, time=attempt.ended or 0.0)
        for attempt, each in (fruitless[0], fruitless[-1])
    ]
    where = "no step is known" if step is None else f"the last step is {step}"
    which = numbered("attempt", [attempt.number + 1 for attempt, _ in fruitless])
    used = f"{view.record.restarts} of {view.record.max_restarts} restarts"
    return Found(
        f"{plural(len(fruitless), 'attempt')} in a row ended without a further step ({which}; {where}), the last one "
        f"with: {failure.summary}",
        f"{view.flk('logs')} shows what was printed; the job ends when its restarts are used up ({used} and "
        f"{view.record.disruptions} of {view.record.max_disruptions} disruptions are), or with {view.flk('delete')}",
        told,
        [failure.pod_name] if failure.pod_name else [],
        since=fruitless[0][0].ended or 0.0,
        exit_code=exit_code_of(failure),
    )


def _fruitless(view: JobView, attempts: list[Attempt]) -> tuple[list[tuple[Attempt, Failure]], int | None]:
    """Return the latest attempts in a row that ended without a further step, and the last step that is known."""
    found: list[tuple[Attempt, Failure]] = []
    best: int | None = None
    for attempt in attempts:
        if attempt.failure is None:
            found = [] if _goes_on(view, attempt, found, best) else found
        elif not attempt.failure.kind.meaning.planned:
            found = [] if _advanced(attempt, best) else [*found, (attempt, attempt.failure)]
        reached = [step for step in (best, attempt.restored, attempt.step) if step is not None]
        best = max(reached, default=None)
    return found, best


def _advanced(attempt: Attempt, best: int | None) -> bool:
    """Return whether an attempt that has ended made a step that no attempt before it had made."""
    if attempt.step is None:
        return _seconds(attempt, attempt.ended) >= SHORT
    return attempt.step > max(best or 0, attempt.restored or 0)


def _goes_on(view: JobView, attempt: Attempt, before: list[tuple[Attempt, Failure]], best: int | None) -> bool:
    """Return whether the running attempt has got further than those before it: by its metrics, or else by its time."""
    if any(progress.step > (best or 0) and progress.time >= attempt.started for progress in view.seen.progress):
        return True
    longest = max((_seconds(each, each.ended) for each, _ in before), default=0.0)
    return _seconds(attempt, view.now) >= longest + SHORT


def _seconds(attempt: Attempt, until: float | None) -> float:
    return (until or attempt.started) - attempt.started


def _standstill(view: JobView) -> Found | None:
    found = view.standstill
    if found is None or view.suspended:
        return None
    return Found(
        found.summary,
        f"{view.flk('stacks')} shows what every rank does now; {view.flk('delete')} ends the job, which its "
        "--hang-timeout does too",
        [Evidence("record of the launchers", found.text, time=found.since)],
        [found.pod_name],
        since=found.since,
    )


CAUSES: Final = (
    Cause(
        "NoProgress",
        _no_progress,
        ExitCode.TRAINING,
        cured_by="another attempt",
        goes_on=True,
    ),
    Cause(
        "Standstill",
        _standstill,
        ExitCode.RUNNING,
        cured_by="the rank that the others wait for",
        goes_on=True,
    ),
)
