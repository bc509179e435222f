"""Look at many jobs, or change them: with few requests and threads, however many jobs there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Final, TypeVar

from flk.errors import FlkError
from flk.jobs.answer import Answer, answered, look
from flk.jobs.listing import with_pods
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.pool import THREADS, ReadPool
from flk.observe.reader import Reader, view_of
from flk.observe.source import KEPT, ListSource

FEW: Final = 4  # jobs that are named: more of them are read from the lists of the namespace
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
) -> Iterator[tuple[JobRef, Answer | FlkError]]:
    """Yield the jobs in their order, each with the answer about it, as `look` returns it, or the error.

    Many jobs are read from the lists of the namespace. ``note`` is called in threads.
    """
    shared = ListSource(client, kept=KEPT)
    listed = _listed(client, jobs) if len(jobs) > FEW else {}

    def look_at(job: JobRef) -> Answer:
        own = client.for_job(job)
        if job not in listed:
            return look(own, job.name, lambda text: note(job, text))
        return answered(own, view_of(own, listed[job], Reader(own, shared)), lambda text: note(job, text))

    yield from in_parallel(jobs, look_at, ReadPool())


def _listed(client: JobClient, jobs: Sequence[JobRef]) -> dict[JobRef, Observation]:
    """Return the jobs that exist, each with its pods."""
    named: dict[str, list[Object]] = defaultdict(list)
    for each in client.list_jobs():
        named[each["metadata"]["name"]].append(each)
    meant = {job: next((each for each in named[job.name] if job.means(each)), None) for job in jobs}
    found = {job: each for job, each in meant.items() if each is not None}
    return dict(zip(found, with_pods(client, [*found.values()]), strict=True))
