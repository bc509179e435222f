"""List the states of many jobs: a request for each kind of job, and one for its pods.

What else jobs in trouble need is read for all of them at once, so that the state is that of `flk status`, whatever the
number of jobs. Logs are read pod by pod, so only `with_records` reads them, of a limited number of jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flk.errors import UnreadableError
from flk.jobs.state import JobList, Phase, State, derive, unreadable
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader
from flk.observe.source import ListSource
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract import foreign

RECORDS: Final = 32  # jobs that run whose launchers' records are read, from the log of each
_Key = tuple[str, str, str]  # namespace, kind and name of an object


@dataclass(frozen=True)
class ListedJob:
    """A job of a list: what was read of it, and its state."""

    seen: Observation
    state: State


def list_states(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> JobList:
    """Return the states of the jobs of the namespace, or of all namespaces, the newest last.

    ``selector`` chooses jobs by their labels, as kubectl's does.
    """
    listed = list_observed(client, all_namespaces=all_namespaces, selector=selector)
    return JobList(each.state for each in listed)


def list_observed(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[ListedJob]:
    """Return the states of the jobs as `list_states` does, each with what was read of its job."""
    jobs = client.list_jobs(all_namespaces=all_namespaces, selector=selector)
    source = ListSource(client, all_namespaces=all_namespaces)
    observed = with_pods(client, jobs, all_namespaces=all_namespaces)
    listed = [_listed(seen, Reader(client, source, logs=False).view) for seen in observed]
    return sorted(listed, key=lambda each: (each.state.created, each.state.namespace, each.state.name))


def with_records(client: JobClient, listed: Sequence[ListedJob], readers: dict[str, Reader]) -> list[ListedJob]:
    """Return the jobs, of which the newest that run have their launchers' records: what only these tell, as hangs.

    ``readers`` are kept from call to call, by the UIDs of the jobs: each repeats a request only when it is due.
    """
    running = [each for each in listed if each.state.phase in (Phase.RUNNING, Phase.RESTARTING)][-RECORDS:]
    known = dict(readers)
    readers.clear()
    for each in running:
        namespace = each.state.namespace or client.namespace
        readers[each.state.uid] = known.get(each.state.uid) or Reader(JobClient(client.api, namespace))
    with ReadPool() as pool:
        fuller = pool.map(lambda each: _listed(each.seen, readers[each.state.uid].view), running)
        by_uid = {each.state.uid: each for each in fuller}
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
