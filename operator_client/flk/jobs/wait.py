"""Follow the states of jobs: until they end, get stuck, reach a goal or are deleted, and say how that ended.

`wait_for_all` follows them, and `raise_for_state` turns the last one into an exit code. Commands and `JobHandle`
import it.
"""

from __future__ import annotations

import enum
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from flk.errors import (
    FlkError,
    JobDeletedError,
    JobFailedError,
    JobRunningError,
    JobStuckError,
    UnreadableError,
    UsageError,
    WaitTimeoutError,
)
from flk.jobs.answer import answer_of, keep, tails
from flk.jobs.state import Phase, State, deleted, derive
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower
from flk.observe.model import PodPhase
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader
from flk.observe.source import KEPT, ListSource
from flk.observe.view import JobView
from flk.spec.units import short_duration
from flk_runtime.contract import ExitCode

FAILURE_DELAY: Final = 5.0  # seconds that pods of a failed job get to leave a record, after the first has ended
_TAILS: Final = 10.0  # seconds at the end in which the last lines of the pods of one job must have been read
_LAST: Final = 2.0  # seconds at the end in which something may still be read of several jobs


class Outcome(str, enum.Enum):
    """Why a wait has ended."""

    FINISHED = "finished"  # the job has succeeded, failed or was deleted
    REACHED = "reached"  # it is where --for wants it
    STUCK = "stuck"  # it cannot go on, and that does not resolve by itself
    TIMEOUT = "timeout"


Tell = Callable[[State], None]
_Seen = tuple[State, "Object | None"]  # the state of a job, and its object; None once it was deleted


@dataclass(frozen=True)
class Waited:
    """The last state of a job that was waited for, and why the wait has ended."""

    state: State
    outcome: Outcome


def wait_for(
    client: JobClient,
    name: str,
    *,
    uid: str | None = None,
    timeout: float | None = None,
    goal: Phase | None = None,
) -> Waited:
    """Wait for one job as `wait_for_all` does for several.

    Raises JobNotFoundError if there is no such job at the beginning, and the error of the watch.
    """
    job = client.ref(name)
    with closing(wait_for_all(client, [replace(job, uid=uid or job.uid)], timeout=timeout, goal=goal)) as ended:
        _, waited = next(ended)
    if isinstance(waited, FlkError):
        raise waited
    return waited


def wait_for_all(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    timeout: float | None = None,
    goal: Phase | None = None,
    report: Tell = lambda state: None,
    watch: Tell = lambda state: None,
) -> Generator[tuple[Sequence[JobRef], Waited | FlkError], None, None]:
    """Wait until each job ends, reaches the goal, gets stuck or ``timeout`` seconds are over.

    With a ``timeout`` of 0 nothing is waited for, and a stuck job is one that has not ended.
    Yields each job when the wait for it is over, with its last state. Those that do not exist at the beginning come
    first, with JobNotFoundError. Those that cannot be watched any more come together, with the error of the watch.
    ``report`` is called with every state worth a line, ``watch`` with every state of a job that goes on.
    """
    until = None if timeout is None else time.monotonic() + timeout
    client = client.with_deadline(timeout)
    conclusions = {job: Conclusion(goal, report, watch, ends_stuck=timeout != 0) for job in jobs}
    with Follower(client, jobs) as follower, closing(_states(client, follower, jobs, until)) as states:
        for concerned, found in states:
            if isinstance(found, FlkError):
                yield concerned, found
            elif waited := conclusions[concerned[0]].take(*found):  # a state concerns one job
                follower.drop(concerned[0])
                yield concerned, waited
        yield from (([job], conclusions[job].now()) for job in jobs if job in follower)


class Conclusion:
    """Says when the wait for one job is over, and tells of its states until then."""

    def __init__(self, goal: Phase | None, report: Tell, watch: Tell, *, ends_stuck: bool) -> None:
        """The arguments are as in `wait_for_all`; ``ends_stuck``: the wait ends if the job is stuck."""
        self._goal, self._ends_stuck, self._report, self._watch = goal, ends_stuck, report, watch
        self._failed_at: float | None = None
        self._last: State | None = None
        self._reported: tuple[str, str, str] | None = None

    def take(self, state: State, job: Object | None) -> Waited | None:
        """Return how the wait ends with this state of the job, None if it goes on."""
        self._last, goal = state, self._goal
        # A short job may end before flk sees it run.
        if goal == state.phase or (goal == Phase.RUNNING and state.phase == Phase.SUCCEEDED):
            return Waited(state, Outcome.REACHED)
        if job is None:
            return self.now()
        if state.finished:
            # The first pod that ends may not know the cause. Wait a moment for the records of the others.
            self._failed_at = self._failed_at or time.monotonic()
            running = any(pod.exit_code is None and pod.phase == PodPhase.RUNNING for pod in state.pods)
            if state.phase == Phase.FAILED and running and time.monotonic() - self._failed_at < FAILURE_DELAY:
                return None
            return Waited(state, Outcome.FINISHED)
        if self._ends_stuck and state.phase == Phase.STUCK:
            return Waited(state, Outcome.STUCK)
        # Numbers that count up are no news, nor are longer messages.
        news = state.phase.value, state.reason, state.attempts[-2].cause if len(state.attempts) > 1 else ""
        if news != self._reported:
            self._reported = news
            self._report(state)
        self._watch(state)
        return None

    def now(self) -> Waited:
        """Return how the wait ends if its time is over now."""
        assert self._last is not None  # noqa: S101 - all jobs are read before their time is over
        return Waited(self._last, Outcome.FINISHED if self._last.finished else Outcome.TIMEOUT)


def follow_states(client: JobClient, name: str) -> Iterator[State]:
    """Yield the states of a job, at least one a second, until it was deleted. The last one before that is kept.

    Raises JobNotFoundError if there is no such job at the beginning, and the error of the watch.
    """
    jobs = [client.ref(name)]
    with (
        Follower(client, jobs) as follower,
        closing(_states(client, follower, jobs, None)) as states,
    ):
        for _, found in states:
            if isinstance(found, FlkError):
                raise found
            state, job = found
            yield state
            if job is None:
                return


@dataclass
class _Followed:
    """One job that is followed, and what was seen of it last."""

    client: JobClient
    job: JobRef
    reader: Reader
    last: State | None = None
    view: JobView | None = None  # before it was deleted

    def take(self, view: JobView) -> _Seen:
        """Return the state of the job that was seen."""
        seen = view.seen
        job = seen.job if seen.gone is None else None
        if job is None:
            namespace, code = self.client.namespace, int(ExitCode.RUNNING)
            last = self.last or State(self.job.name, namespace, self.job.uid, Phase.PENDING, code)
            self.last = deleted(last, name_reused=seen.name_reused, now=seen.gone)
        else:
            self.last, self.view = derive(view), view
        return self.last, job

    def keep(self, timeout: float) -> None:
        """Keep the last answer about the job, with the lines of its pods that are read within ``timeout`` seconds."""
        if self.view is None or self.last is None:
            return
        lines = {} if self.last.was_deleted else tails(self.client, self.view.seen.pods, timeout)
        keep(self.client, answer_of(self.view), lines)


def _states(
    client: JobClient, follower: Follower, jobs: Sequence[JobRef], until: float | None
) -> Generator[tuple[Sequence[JobRef], _Seen | FlkError], None, None]:
    """Yield the states of the jobs, and the errors of those that are followed no longer, each with all that have it.

    Ends when no job is followed, and when time.monotonic() has reached ``until``. The last answers are kept.
    """
    several = len(jobs) > 1
    shared = ListSource(client, kept=KEPT) if several else None
    pool = ReadPool()
    followed = {job: _Followed(client.for_job(job), job, Reader(client.for_job(job), shared)) for job in jobs}
    try:
        for seen in follower.updates(until):
            yield from _errors(follower)
            # The requests end in time: the client has the deadline.
            views = {job: pool.submit(followed[job].reader.view, seen[job]) for job in seen if several}
            for job, observed in seen.items():
                try:
                    view = views[job].result() if several else followed[job].reader.view(observed)
                    found: _Seen | FlkError = followed[job].take(view)
                except UnreadableError as error:  # it ends the watch of no other job
                    follower.drop(job)
                    found = error
                yield [job], found
            if until is not None and time.monotonic() >= until:
                return
        yield from _errors(follower)
    finally:
        # Whoever deletes the job next takes its pods along, with their logs: what they say last is kept now.
        pool.shutdown()
        end = time.monotonic() + (_LAST if several else _TAILS)
        for one in followed.values():
            one.keep(max(0.0, end - time.monotonic()))


def _errors(follower: Follower) -> Iterator[tuple[Sequence[JobRef], FlkError]]:
    """Yield the errors of jobs that are followed no longer, each with all jobs that have it."""
    jobs: dict[FlkError, list[JobRef]] = defaultdict(list)
    for job, error in follower.take_errors().items():
        jobs[error].append(job)
    yield from ((each, error) for error, each in jobs.items())


def parse_goal(text: str) -> Phase:
    """Return the phase that ``Running`` names, for ``--for``. Raises UsageError for others."""
    goals = [phase for phase in Phase if phase is not Phase.DELETED]  # every wait ends with a job that is deleted
    for phase in goals:
        if text.lower() == phase.value.lower():
            return phase
    raise UsageError(f"--for: must be one of {', '.join(phase.value for phase in goals)} (is {text!r})")


def describe(state: State) -> str:
    """Return one line about a job's state for people who wait."""
    line = state.sentence
    if state.phase == Phase.RUNNING:
        line += f", {state.ready} of {state.replicas} pods"
        if len(state.attempts) > 1:
            line += f", attempt {state.attempt} after: {state.attempts[-2].cause}"
    elif not state.finished and not state.reason:
        line += f", {state.ready} of {state.replicas} pods are running"
    return line


def run_time_text(state: State) -> str:
    """Return how long a finished job ran and in how many attempts: `` after 5m and 2 attempts``; empty if unknown."""
    if not state.started or not state.ended:
        return ""
    attempts = f" and {state.attempt} attempts" if state.attempt > 1 else ""
    return f" after {short_duration(state.ended - state.started)}{attempts}"


def raise_for_state(
    state: State,
    client: JobClient,
    outcome: Outcome = Outcome.FINISHED,
    timeout: float | None = None,
    *,
    goal: Phase | None = None,
) -> None:
    """Return if the job has succeeded; else raise the error that has the exit code of the contract.

    ``outcome`` is why the wait has ended, ``timeout`` the time in seconds that flk has waited for a job that has not
    finished, and ``goal`` the goal of the wait, if it was not the job's end.
    """
    name, command = state.name, client.commands.flk
    if state.phase == Phase.SUCCEEDED:
        return
    if state.phase == Phase.FAILED:
        rank = f" --rank {state.failure.rank}" if state.failure and state.failure.rank is not None else ""
        unretried = f"; {state.no_retry_reason}" if state.no_retry_reason else ""
        raise JobFailedError(
            f"job {name} failed{run_time_text(state)}: {state.message or 'the operator gives no reason'}{unretried}",
            hint=f"{command('status', name)} shows more; {command('logs', name)}{rank} shows what was printed",
            code=ExitCode(state.code),
        )
    if outcome == Outcome.STUCK:
        raise JobStuckError(
            f"job {name} is stuck: {state.message or state.reason}",
            hint=f"{command('why', name)} shows the cause and what to do",
            code=ExitCode((state.cause.exit_code if state.cause else 0) or ExitCode.INFRASTRUCTURE),
        )
    if state.was_deleted:
        raise JobDeletedError(
            f"job {name} is gone: {state.message}", hint=f"{command('why', name)} shows what was seen of it last"
        )
    again = command("wait", name) + (f" --for {goal}" if goal else "")
    if state.phase == Phase.SUSPENDED:
        hint = f"{command('resume', name)} starts it again"
    elif timeout == 0:
        hint = f"{again} waits for {'that' if goal else 'its end'}"
    elif state.phase == Phase.TERMINATING:
        hint = f"it is being deleted; {again} waits again"
    elif state.phase == Phase.STUCK:
        hint = f"{command('why', name)} shows the cause and what to do; {again} waits again"
    else:
        hint = f"the job goes on; {again} waits again"
    if timeout == 0:
        raise JobRunningError(f"job {describe(state)}", hint=hint)
    raise WaitTimeoutError(f"the wait ended after {short_duration(timeout or 0)}: job {describe(state)}", hint=hint)
