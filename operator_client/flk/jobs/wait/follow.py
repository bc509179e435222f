"""Get the state of a job now, or follow jobs until they end, get stuck or reach a goal."""

from __future__ import annotations

import difflib
import enum
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from flk.errors import FlkError, UnreadableError
from flk.jobs.answer import answer_of, keep, tails
from flk.jobs.state import Phase, PodPhase, State, deleted, derive
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader
from flk.observe.source import KEPT, ListSource
from flk.observe.view import JobView
from flk.targets import TARGETS, Target, target_of
from flk_runtime.contract.failure import ExitCode

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
    watch: Tell = lambda state: None,
) -> Waited:
    """Wait for one job as `wait_for_all` does for several.

    Raises JobNotFoundError if there is no such job at the beginning, and the error of the watch.
    """
    job = client.ref(name)
    jobs = [replace(job, uid=uid or job.uid)]
    with closing(wait_for_all(client, jobs, timeout=timeout, goal=goal, fail_fast=fail_fast, watch=watch)) as ended:
        _, waited = next(ended)
    if isinstance(waited, FlkError):
        raise waited
    return waited


def wait_for_all(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    timeout: float | None = None,
    goal: Goal | None = None,
    fail_fast: bool = True,
    report: Tell = lambda state: None,
    watch: Tell = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> Generator[tuple[Sequence[JobRef], Waited | FlkError], None, None]:
    """Wait until each job ends, reaches the goal, gets stuck (with ``fail_fast``) or ``timeout`` seconds are over.

    Where the goal is the deletion, a job that has ended or is stuck is waited for: it can still be deleted.
    Yields each job when the wait for it is over, with its last state. Those that do not exist at the beginning come
    first, with JobNotFoundError. Those that cannot be watched any more come together, with the error of the watch.
    ``report`` is called with every state worth a line, ``watch`` with every state of a job that goes on, ``note`` with
    messages of flk about itself.
    """
    until = None if timeout is None else time.monotonic() + timeout
    client = client.with_deadline(timeout)
    note_once = functools.cache(note)  # what holds for a kind of jobs
    conclusions = {job: Conclusion(goal, fail_fast, report, watch, note_once) for job in jobs}
    with Follower(client, jobs) as follower, closing(_states(client, follower, jobs, until)) as states:
        for of, found in states:
            if isinstance(found, FlkError):
                yield of, found
            elif waited := conclusions[of[0]].take(*found):
                follower.drop(of[0])
                yield of, waited
        yield from (([job], conclusions[job].now()) for job in jobs if job in follower)


class Conclusion:
    """Says when the wait for one job is over, and tells of its states until then."""

    def __init__(
        self, goal: Goal | None, fail_fast: bool, report: Tell, watch: Tell, note: Callable[[str], None]
    ) -> None:
        """The arguments are as in `wait_for_all`."""
        self._goal, self._fail_fast, self._report, self._watch, self._note = goal, fail_fast, report, watch, note
        self._failed_at: float | None = None
        self._last: State | None = None
        self._quiet = Quiet()

    def take(self, state: State, job: Object | None) -> Waited | None:
        """Return how the wait ends with this state of the job, None if it goes on."""
        is_first = self._last is None
        self._last, goal = state, self._goal
        deletion = goal is not None and goal.is_deletion
        if goal is not None and goal.is_met(state, job):
            return Waited(state, Outcome.REACHED)
        if job is None:
            return self.now()
        if state.finished and not deletion:
            # The first pod that ends may not know the cause. Wait a moment for the records of the others.
            self._failed_at = self._failed_at or time.monotonic()
            running = any(pod.exit_code is None and pod.phase == PodPhase.RUNNING for pod in state.pods)
            if state.phase == Phase.FAILED and running and time.monotonic() - self._failed_at < FAILURE_DELAY:
                return None
            return Waited(state, Outcome.FINISHED)
        if self._fail_fast and state.phase == Phase.STUCK and not deletion:
            return Waited(state, Outcome.STUCK)
        if is_first and goal is not None and (doubt := goal.doubt(job)):
            self._note(doubt)
        if self._quiet.is_news(state):
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
        yield from _errors(follower)
        for seen in follower.updates(until):
            yield from _errors(follower)
            for job, read in _reads(pool, followed, seen, until).items():
                try:
                    found: _Seen | FlkError = followed[job].take(read())
                except UnreadableError as error:  # it ends the watch of no other job
                    follower.drop(job)
                    found = error
                yield [job], found
            if until is not None and time.monotonic() >= until:
                return
        yield from _errors(follower)
    finally:
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


def _reads(
    pool: ReadPool, followed: dict[JobRef, _Followed], seen: dict[JobRef, Observation], until: float | None
) -> dict[JobRef, Callable[[], JobView]]:
    """Return what makes the views of the jobs, of several without what was not read when the time is over."""
    if len(followed) == 1:  # its requests end in time
        return {job: functools.partial(followed[job].reader.view, each) for job, each in seen.items()}
    futures: dict[JobRef, Future[JobView]] = {
        job: pool.submit(followed[job].reader.view, each) for job, each in seen.items()
    }
    wait(futures.values(), timeout=None if until is None else max(_LAST, until - time.monotonic()))
    return {
        job: futures[job].result
        if futures[job].done()
        else functools.partial(JobView, each, followed[job].client.commands)
        for job, each in seen.items()
    }


FIRST_PAUSE: Final = 60.0  # seconds after which a state that was reported before may be reported again
LONGEST_PAUSE: Final = 3600.0  # the pause doubles with each report, up to this


@dataclass
class _Report:
    time: float
    pause: float


class Quiet:
    """Remembers what was reported. States that alternate, as in a restart loop, are reported ever more rarely."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: tuple[str, ...] | None = None
        self._reports: dict[tuple[str, ...], _Report] = {}

    def is_news(self, state: State) -> bool:
        """Return whether the state should be reported. Numbers that count up are no news, nor are longer messages."""
        last_cause = state.attempts[-2].cause if len(state.attempts) > 1 else ""
        key = (state.phase.value, state.reason, last_cause)
        if key == self._current:
            return False
        self._current = key
        now, report = self._clock(), self._reports.get(key)
        if report is None:
            self._reports[key] = _Report(now, FIRST_PAUSE)
            return True
        if now - report.time < report.pause:
            return False
        report.time, report.pause = now, min(2 * report.pause, LONGEST_PAUSE)
        return True


_DELETION: Final = ("delete", "deleted")
_SLIP: Final = 2  # letters more or less that a misspelt name has at most


@dataclass(frozen=True)
class Goal:
    """A phase, or (``condition``) a condition of the job's object with its status."""

    text: str  # as the user has written it
    phase: Phase | None = None
    condition: str = ""
    status: str = "True"

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Return the goal in ``Running``, ``delete`` or ``condition=Succeeded``. Raises ValueError for others."""
        kind, equals, rest = text.partition("=")
        if equals and kind == "condition" and rest:
            condition, _, status = rest.partition("=")
            goal = cls(text, None, condition.lower(), status or "True")
            known = _conditions(*TARGETS.values())
            near = _nearest(goal.condition, known)
            if near and goal.condition not in known and _is_slip(goal.condition, near):
                names = ", ".join(known.values())
                raise ValueError(f"jobs have no condition {condition}: did you mean {known[near]}? flk knows {names}")
            return goal
        if text.lower() in _DELETION:
            return cls(text, Phase.DELETED)
        for phase in Phase:
            if text.lower() == phase.value.lower():
                return cls(text, phase)
        phases = ", ".join(phase.value for phase in Phase)
        raise ValueError(f"must be {phases}, delete, or condition=TYPE (is {text!r})")

    @property
    def is_deletion(self) -> bool:
        """Whether the goal is the deletion of the job, which a job that has ended may still reach."""
        return self.phase == Phase.DELETED

    def doubt(self, job: Object) -> str:
        """Return what to say of a condition that nothing known sets in an object like ``job``; empty for others."""
        target = target_of(job)
        known = _conditions(target)
        if self.phase is not None or self.condition in known:
            return ""
        near = _nearest(self.condition, known)
        hint = f"did you mean {known[near]}?" if near else f"flk knows {', '.join(known.values())}"
        return f"flk knows nothing that sets {self.text} in a {target.kind}, and waits until something does; {hint}"

    def is_met(self, state: State, job: Object | None) -> bool:
        """Return whether the job has reached the goal. ``job`` is None once it was deleted."""
        if self.is_deletion:
            return job is None
        if self.phase is not None:
            # A short job may end before flk sees it run.
            ran = self.phase == Phase.RUNNING and state.phase == Phase.SUCCEEDED
            return state.phase == self.phase or ran
        if job is None:
            return False
        names = target_of(job).condition_names()  # in PyTorchJobs, which may be given for every kind
        return any(
            self.condition in (c["type"].lower(), names.get(c["type"], "").lower()) and c.get("status") == self.status
            for c in (job.get("status") or {}).get("conditions") or []
        )


def _conditions(*targets: Target) -> dict[str, str]:
    """Return the names of the conditions of these kinds, and those that they have in PyTorchJobs, by small letters.

    Other controllers may add conditions of their own.
    """
    pairs = (pair for target in targets for pair in target.condition_names().items())
    return {name.lower(): name for pair in pairs for name in pair}


def _nearest(condition: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a condition, if one is; empty otherwise."""
    return next(iter(difflib.get_close_matches(condition, known, n=1, cutoff=0.8)), "")


def _is_slip(condition: str, near: str) -> bool:
    """Whether a condition is a known one misspelt. A controller's own may have a known name with more words to it."""
    return abs(len(condition) - len(near)) <= _SLIP and condition not in near and near not in condition
