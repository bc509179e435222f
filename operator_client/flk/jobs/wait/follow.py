"""Get the state of a job now, or follow it until it ends, gets stuck or reaches a goal."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from flk.jobs.archive_writer import ArchiveWriter, remember
from flk.jobs.state import Phase, PodPhase, State, deleted, derive
from flk.jobs.tails import TailReader
from flk.jobs.wait.goal import Goal
from flk.jobs.wait.quiet import Quiet
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk.observe.reader import Reader, view_job
from flk.observe.view import JobView
from flk_runtime.contract.exit_codes import ExitCode

FAILURE_DELAY: Final = 5.0  # seconds that pods of a failed job get to leave a record, after the first has ended
_TAILS: Final = 10.0  # seconds in which the last lines of the pods must have been read


class Outcome(str, enum.Enum):
    """Why a wait has ended."""

    FINISHED = "finished"  # the job has succeeded, failed or was deleted
    REACHED = "reached"  # it is where --for wants it
    STUCK = "stuck"  # it cannot go on, and that does not resolve by itself
    TIMEOUT = "timeout"


Tell = Callable[[State], None]


@dataclass(frozen=True)
class Waited:
    """The last state of a job that was waited for, and why the wait has ended."""

    state: State
    outcome: Outcome


def get_state(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> State:
    """Return the state of a job now. For a job that is gone, return the archived state and call ``note``.

    The observation is archived. Raises JobNotFoundError if there is no job and nothing is archived of one.
    """
    return look(client, name, note)[1]


def look(client: JobClient, name: str, note: Callable[[str], None] = lambda text: None) -> tuple[JobView, State]:
    """Return the view of a job now, and its state, as `get_state` does."""
    view = view_job(client, name, note)
    state = derive(view)
    if view.gone is None:
        remember(client, view.around, state)
    return view, state


def wait_until_finished(client: JobClient, name: str, *, uid: str | None = None) -> State:
    """Return the state of a job once it has succeeded, failed or was deleted."""
    return wait_for(client, name, uid=uid, fail_fast=False).state


def wait_for(
    client: JobClient,
    name: str,
    *,
    uid: str | None = None,
    timeout: float | None = None,
    goal: Goal | None = None,
    fail_fast: bool = True,
    report: Callable[[State], None] = lambda state: None,
    watch: Callable[[State], None] = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> Waited:
    """Follow a job until it ends, reaches the goal, gets stuck (with ``fail_fast``) or ``timeout`` seconds are over.

    ``report`` is called with every state worth a line, ``watch`` with every state of a job that goes on, ``note`` with
    messages of flk about itself. Raises JobNotFoundError if there is no such job at the beginning.
    """
    concluded = Conclusion(goal, fail_fast, report, watch, note)
    with closing(_states(client, name, uid, timeout, note)) as states:
        for state, job in states:
            if waited := concluded.take(state, job):
                return waited
    return concluded.now()


class Conclusion:
    """Says when the wait for one job is over, and tells of its states until then."""

    def __init__(
        self, goal: Goal | None, fail_fast: bool, report: Tell, watch: Tell, note: Callable[[str], None]
    ) -> None:
        """The arguments are as in `wait_for`."""
        self._goal, self._fail_fast, self._report, self._watch, self._note = goal, fail_fast, report, watch, note
        self._failed_at: float | None = None
        self._last: State | None = None
        self._quiet = Quiet()

    def take(self, state: State, job: Object | None) -> Waited | None:
        """Return how the wait ends with this state of the job, None if it goes on."""
        is_first = self._last is None
        self._last, goal = state, self._goal
        if goal is not None and goal.is_met(state, job):
            return Waited(state, Outcome.REACHED)
        if state.finished and not (goal is not None and goal.is_deletion and job is not None):
            # The first pod that ends may not know the cause. Wait a moment for the records of the others.
            self._failed_at = self._failed_at or time.monotonic()
            running = any(pod.exit_code is None and pod.phase == PodPhase.RUNNING for pod in state.pods)
            if state.phase == Phase.FAILED and running and time.monotonic() - self._failed_at < FAILURE_DELAY:
                return None
            return Waited(state, Outcome.FINISHED)
        if self._fail_fast and state.phase == Phase.STUCK:
            return Waited(state, Outcome.STUCK)
        if is_first and goal is not None and job is not None and (doubt := goal.doubt(job)):
            self._note(doubt)
        if self._quiet.is_news(state):
            self._report(state)
        self._watch(state)
        return None

    def now(self) -> Waited:
        """Return how the wait ends if its time is over now."""
        assert self._last is not None  # noqa: S101 - without a state the follower raises
        return Waited(self._last, Outcome.FINISHED if self._last.finished else Outcome.TIMEOUT)


def follow_states(client: JobClient, name: str) -> Iterator[State]:
    """Yield the states of a job, at least one a second, until it was deleted. All observations are archived."""
    return (state for state, _ in _states(client, name, None, None, lambda text: None))


def _states(
    client: JobClient, name: str, uid: str | None, timeout: float | None, note: Callable[[str], None]
) -> Generator[tuple[State, Object | None], None, None]:
    """Yield the states of a job, each with its object, at least one a second.

    Ends when the job was deleted, and when the time is over. All observations are archived.
    """
    until = None if timeout is None else time.monotonic() + timeout
    client = client.ending(timeout)
    reader, writer = Reader(client), ArchiveWriter(client, note)
    tails = TailReader(client, writer)
    last: State | None = None
    try:
        with Follower(client, name, uid) as follower:
            for seen in follower.updates():
                if seen.gone is not None:
                    last = deleted_from(last, seen, client, name, uid or "")
                    writer.observe(seen, last)
                    yield last, None
                    return
                seen = reader.complete(seen)
                last = derive(JobView(seen, client.commands))
                writer.observe(seen, last)
                tails.consider(seen.pods)
                yield last, seen.job
                if until is not None and time.monotonic() >= until:
                    return
    finally:
        tails.close(_TAILS)
        writer.close()


def deleted_from(last: State | None, seen: Observation, client: JobClient, name: str, uid: str) -> State:
    """Return the state of a job that was seen to be deleted, from its last one."""
    last = last or State(name, client.namespace, uid, Phase.PENDING, int(ExitCode.RUNNING))
    return deleted(last, name_reused=seen.name_reused, now=seen.gone)
