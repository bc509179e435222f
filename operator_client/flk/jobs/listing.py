"""List the states of many jobs: a request for each kind of job, and one for its pods.

What else jobs in trouble need is read for all of them at once, so that the state is that of `flk status`, whatever the
number of jobs. Logs are read pod by pod, so only `with_records` reads them, of a limited number of jobs.
Further functions are about many jobs: whose they are, and what each of them does.
"""

from __future__ import annotations

import getpass
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from flk.errors import FlkError, UnreadableError
from flk.jobs.state import Phase, State, derive, unreadable
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.pool import THREADS, ReadPool
from flk.observe.reader import Reader, view_of
from flk.observe.source import KEPT, ListSource
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract import foreign
from flk_runtime.contract.values import dataclass

if TYPE_CHECKING:
    from flk.jobs.answer import Answer


RECORDS: Final = 32  # jobs that run whose launchers' records are read, from the log of each
_Key = tuple[str, str, str]  # namespace, kind and name of an object


@dataclass(frozen=True)
class ListedJob:
    """A job of a list: what was read of it, and its state."""

    seen: Observation
    state: State


def list_states(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[State]:
    """Return the states of the jobs of the namespace, or of all namespaces, the newest last.

    ``selector`` chooses jobs by their labels, as kubectl's does.
    """
    listed = list_observed(client, all_namespaces=all_namespaces, selector=selector)
    return [each.state for each in listed]


def list_observed(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[ListedJob]:
    """Return the states of the jobs as `list_states` does, each with what was read of its job."""
    jobs = client.list_jobs(all_namespaces=all_namespaces, selector=selector)
    source = ListSource(client, all_namespaces=all_namespaces)
    observed = with_pods(client, jobs, all_namespaces=all_namespaces)
    listed = [_listed(seen, Reader(client, source, logs=False).view) for seen in observed]
    return sorted(listed, key=lambda each: (each.state.created, each.state.namespace, each.state.name))


def with_records(client: JobClient, listed: Sequence[ListedJob]) -> list[ListedJob]:
    """Return the jobs, of which the newest that run have their launchers' records: what only these tell, as hangs."""
    # The record of a job that has ended is in the message of its pods, which the list has. Of one that runs, the log of
    # pod 0 alone has it: a request for each job, so that the number is limited.
    running = [each for each in listed if each.state.phase in (Phase.RUNNING, Phase.RESTARTING)][-RECORDS:]

    def read(job: ListedJob) -> ListedJob:
        reader = Reader(JobClient(client.api, job.state.namespace or client.namespace))
        return _listed(job.seen, reader.view)

    with ReadPool() as pool:
        by_uid = {each.state.uid: each for each in pool.map(read, running)}
    return [by_uid.get(each.state.uid, each) for each in listed]


def _listed(seen: Observation, view_of: Callable[[Observation], JobView]) -> ListedJob:
    """Return a job of the list; one whose objects cannot be read takes no other with it."""
    try:
        view = view_of(seen)
        return ListedJob(view.seen, derive(view))
    except (UnreadableError, *foreign.ERRORS) as error:
        return ListedJob(seen, unreadable(seen.job or {}, error))


def with_pods(client: JobClient, jobs: Sequence[Object], *, all_namespaces: bool = False) -> list[Observation]:
    """Return an observation of each job and its pods, for which the pods are listed once for each kind of job."""
    pods: dict[_Key, list[Object]] = defaultdict(list)
    for target in {target_of(job).name: target_of(job) for job in jobs}.values():
        for pod in client.list_all_pods(target, all_namespaces=all_namespaces):
            pods[pod["metadata"].get("namespace", ""), target.kind, target.job_name(pod)].append(pod)
    found, now = [], client.now()
    for job in jobs:
        target, meta = target_of(job), job["metadata"]
        own = target.own(pods[meta.get("namespace", ""), target.kind, meta["name"]], job)
        found.append(Observation(job, own, now))
    return found


def current_owner() -> str:
    """Return where this process submits jobs from: ``user@host``, by their names on this machine."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


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
    from flk.jobs.answer import answered, look  # which `flk list` does not need

    shared = ListSource(client, kept=KEPT)
    listed = _observed(client, jobs) if len(jobs) > FEW else {}

    def look_at(job: JobRef) -> Answer:
        own = client.for_job(job)
        if job not in listed:
            return look(own, job.name, lambda text: note(job, text))
        return answered(own, view_of(own, listed[job], Reader(own, shared)), lambda text: note(job, text))

    yield from in_parallel(jobs, look_at, ReadPool())


def _observed(client: JobClient, jobs: Sequence[JobRef]) -> dict[JobRef, Observation]:
    """Return the jobs that exist, each with its pods."""
    by_name: dict[str, list[Object]] = defaultdict(list)
    for listed in client.list_jobs():
        by_name[listed["metadata"]["name"]].append(listed)
    # Jobs of several kinds may have a name: the first one is meant, as where one job is looked for.
    found = {job: next((listed for listed in by_name[job.name] if job.means(listed)), None) for job in jobs}
    meant = {job: listed for job, listed in found.items() if listed is not None}
    return dict(zip(meant, with_pods(client, [*meant.values()]), strict=True))
