"""Look at many jobs, and wait for them: with few requests and threads, however many jobs there are."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final, TypeVar

from flk.errors import FlkError
from flk.jobs.archive_writer import ArchiveWriter, remember
from flk.jobs.listing import with_pods
from flk.jobs.state import State, derive
from flk.jobs.tails import TailReader
from flk.jobs.wait.follow import Conclusion, Tell, Waited, deleted_from, look
from flk.jobs.wait.goal import Goal
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Followers
from flk.observe.observation import Observation
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader, view_of
from flk.observe.shared import SharedAnswers
from flk.observe.view import JobView

THREADS: Final = 8  # requests at a time
FEW: Final = 4  # jobs that are named: more of them are read from the lists of the namespace
_LAST: Final = 2.0  # seconds at the end in which lines of pods may still be read
_Result = TypeVar("_Result")


def in_parallel(
    jobs: Sequence[JobRef], act: Callable[[JobRef], _Result], pool: Executor | None = None
) -> Iterator[tuple[JobRef, _Result | FlkError]]:
    """Call ``act`` for the jobs in a few threads; yield each job, in their order, with the result or the error.

    After Ctrl-C, calls that have begun are finished, unless they are made in a ``pool`` for which nobody waits.
    """
    pool = pool or ThreadPoolExecutor(min(THREADS, max(1, len(jobs))), thread_name_prefix="flk-job")
    try:
        for job, future in [(job, pool.submit(act, job)) for job in jobs]:
            try:
                yield job, future.result()
            except FlkError as error:
                yield job, error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def look_at_all(
    client: JobClient, jobs: Sequence[JobRef], note: Callable[[JobRef, str], None]
) -> Iterator[tuple[JobRef, tuple[JobView, State] | FlkError]]:
    """Yield the jobs in their order, each with its view and its state now, as `look` returns them, or the error.

    Many jobs are read from the lists of the namespace. ``note`` is called in threads.
    """
    shared = SharedAnswers(client)
    listed = _listed(client, jobs) if len(jobs) > FEW else {}

    def look_at(job: JobRef) -> tuple[JobView, State]:
        own = client.of(job)
        if job not in listed:
            return look(own, job.name, lambda text: note(job, text))
        view = view_of(own, listed[job], Reader(own, shared))
        state = derive(view)
        remember(own, view.around, state, prune=job == jobs[-1])
        return view, state

    yield from in_parallel(jobs, look_at, ReadPool(THREADS))


def _listed(client: JobClient, jobs: Sequence[JobRef]) -> dict[JobRef, Observation]:
    """Return the jobs that exist, each with its pods."""
    named: dict[str, list[Object]] = defaultdict(list)
    for each in client.list_jobs():
        named[each["metadata"]["name"]].append(each)
    meant = {job: next((each for each in named[job.name] if job.means(each)), None) for job in jobs}
    found = {job: each for job, each in meant.items() if each is not None}
    return dict(zip(found, with_pods(client, [*found.values()]), strict=True))


@dataclass
class _Followed:
    """One job that is waited for."""

    client: JobClient
    reader: Reader
    writer: ArchiveWriter
    tails: TailReader
    conclusion: Conclusion
    last: State | None = field(default=None)


def wait_for_all(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    timeout: float | None = None,
    goal: Goal | None = None,
    fail_fast: bool = True,
    report: Tell,
    watch: Tell,
    note: Callable[[str], None],
) -> Iterator[tuple[Sequence[JobRef], Waited | FlkError]]:
    """Wait for jobs as `wait_for` does for one, and yield each when the wait for it is over, with the last state.

    Those that do not exist at the beginning come first, with an error. Those that cannot be watched any more come
    together, with the error of the watch.
    """
    until = None if timeout is None else time.monotonic() + timeout
    client = client.ending(timeout)
    shared, followed = SharedAnswers(client), {}
    pool, tails = ReadPool(THREADS), ReadPool(THREADS)
    note_once = functools.cache(note)  # what holds for a kind of jobs
    try:
        with Followers(client, jobs) as followers:
            yield from _failed(followers)
            for job in jobs:
                own = client.of(job)
                writer = ArchiveWriter(own, note)
                conclusion = Conclusion(goal, fail_fast, report, watch, note_once)
                tail_reader = TailReader(own, writer, tails)
                followed[job] = _Followed(own, Reader(own, shared), writer, tail_reader, conclusion)
            for seen in followers.updates(until):
                yield from _failed(followers)
                complete = _completed(pool, followed, seen, until)
                for job, each in complete.items():
                    waited = _take(job, followed[job], each)
                    if waited is not None:
                        followers.drop(job)
                        yield [job], waited
                if until is not None and time.monotonic() >= until:
                    yield from (([job], followed[job].conclusion.now()) for job in jobs if job in followers)
                    return
            yield from _failed(followers)
    finally:
        pool.shutdown()
        _close(followed.values(), tails)


def _failed(followers: Followers) -> Iterator[tuple[Sequence[JobRef], FlkError]]:
    """Yield the errors of jobs that are followed no longer, each with all jobs that have it."""
    jobs: dict[FlkError, list[JobRef]] = defaultdict(list)
    for job, error in followers.take_errors().items():
        jobs[error].append(job)
    yield from ((each, error) for error, each in jobs.items())


def _completed(
    pool: ReadPool, followed: dict[JobRef, _Followed], seen: dict[JobRef, Observation], until: float | None
) -> dict[JobRef, Observation]:
    """Return the observations with what their jobs need, or without what was not read when the time is over."""
    futures: dict[JobRef, Future[Observation]] = {
        job: pool.submit(followed[job].reader.complete, each) for job, each in seen.items() if each.gone is None
    }
    wait(futures.values(), timeout=None if until is None else max(_LAST, until - time.monotonic()))
    return {**seen, **{job: future.result() for job, future in futures.items() if future.done()}}


def _take(job: JobRef, followed: _Followed, seen: Observation) -> Waited | None:
    if seen.gone is not None:
        followed.last = deleted_from(followed.last, seen, followed.client, job.name, job.uid)
        followed.writer.observe(seen, followed.last)
        return followed.conclusion.take(followed.last, None) or followed.conclusion.now()
    followed.last = derive(JobView(seen, followed.client.commands))
    followed.writer.observe(seen, followed.last)
    followed.tails.consider(seen.pods)
    return followed.conclusion.take(followed.last, seen.job)


def _close(followed: Iterable[_Followed], tails: ReadPool) -> None:
    until = time.monotonic() + _LAST
    last: ArchiveWriter | None = None
    for each in followed:
        each.tails.close(max(0.0, until - time.monotonic()))
        each.writer.flush()
        last = each.writer
    tails.shutdown()
    if last is not None:
        last.close()
