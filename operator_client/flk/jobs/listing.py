"""List the states of many jobs: a request for each kind of job, and one for its pods.

What else jobs in trouble need is read for all of them at once, so that the state is that of `flk status`, whatever the
number of jobs. Logs are read pod by pod, so only `with_records` reads them, of a limited number of jobs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk import labels
from flk.errors import ApiError, UnreadableError
from flk.jobs.state import JobList, Phase, State, derive, unreadable
from flk.kube import Object, RequestTarget, Resource
from flk.observe.client import JobClient
from flk.observe.needs import Answer, needs, with_answer
from flk.observe.observation import Need, Observation, involved
from flk.observe.pods import one_line
from flk.observe.pool import ReadPool
from flk.observe.reader import Reader, list_all, list_controllers, list_other_pods, list_pending, pod_groups_of, without
from flk.observe.resources import CLAIMS, NODES, VOLUMES, WORKLOADS
from flk.observe.shared import SharedAnswers
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract import foreign

RECORDS: Final = 32  # jobs that run whose launchers' records are read, from the log of each
_Key = tuple[str, str, str]  # namespace, kind and name of an object
# What is read for all jobs at once, or for all that wait in a queue.
_LISTED: Final = (
    *("events", "nodes", "claims", "volumes", "workloads", "pending_workloads", "pod_groups", "controllers"),
    *("other_pods", "foreign_pods"),
)
# Reasons of events that every job and every pod has and no cause reads: they are most of all events.
_USUAL: Final = ("Created", "Scheduled", "SuccessfulCreate", "SuccessfulCreatePod", "SuccessfulCreateService")


@dataclass(frozen=True)
class Listed:
    """A job of a list: what was read of it, and its state."""

    seen: Observation
    state: State


def list_states(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> JobList:
    """Return the states of the jobs of the namespace, or of all namespaces, the newest last.

    ``selector`` chooses jobs by their labels, as kubectl's does.
    """
    listed = list_observed(client, all_namespaces=all_namespaces, selector=selector)
    return JobList(each.state for each in listed)


def list_observed(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[Listed]:
    """Return the states of the jobs as `list_states` does, each with what was read of its job."""
    jobs = client.list_jobs(all_namespaces=all_namespaces, selector=selector)
    answers = _Answers(client, all_namespaces)
    listed = [_listed(seen, answers.complete) for seen in with_pods(client, jobs, all_namespaces=all_namespaces)]
    return sorted(listed, key=lambda each: (each.state.created, each.state.namespace, each.state.name))


def with_records(client: JobClient, listed: Sequence[Listed], readers: dict[str, Reader]) -> list[Listed]:
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


def _listed(seen: Observation, view_of: Callable[[Observation], JobView]) -> Listed:
    """Return a job of the list; one whose objects cannot be read takes no other with it."""
    try:
        view = view_of(seen)
        return Listed(view.seen, derive(view))
    except (UnreadableError, *foreign.ERRORS) as error:
        return Listed(seen, unreadable(seen.job or {}, error))


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


class _Answers:
    """Answers what jobs need from lists that are read once for all of them: everything but logs and single objects."""

    def __init__(self, client: JobClient, all_namespaces: bool) -> None:
        self._client = client
        self._all_namespaces = all_namespaces
        self._events: dict[str, dict[_Key, list[Object]]] = {}  # by kind of the objects that they are about
        self._lists = SharedAnswers(client, kept=math.inf)

    def complete(self, seen: Observation) -> JobView:
        """Return the view of the observation with the answers to the requests that a list of jobs makes."""
        view = JobView(seen)
        while wanted := [need for need in needs(view) if need.what in _LISTED]:
            for need in wanted:
                seen = with_answer(seen, need, self._answer(need, view))
            view = JobView(seen)
        return view

    def _answer(self, need: Need, view: JobView) -> Answer:
        client = self._client
        match need.what:
            case "events":
                return self._about(need.kind, (view.namespace, need.kind, need.name))
            case "nodes":
                return self._named(NODES, need.name) if need.name else self._listed(NODES, namespaced=False)
            case "workloads":
                every = self._listed(WORKLOADS)
                return replace(every, items=[each for each in every.items if _job_uid(each) == view.uid])
            case "pending_workloads":
                return self._once((need, view.namespace), lambda: list_pending(client, view.namespace, need.name))
            case "claims":
                return self._named(CLAIMS, need.name, view.namespace)
            case "volumes":
                return self._named(VOLUMES, need.name)
            case "pod_groups":
                return self._named(pod_groups_of(view.job), need.name, view.namespace)
            case "controllers":
                return self._once((need, view.target.name), lambda: list_controllers(client, view.target))
            case _:
                return self._once(need, lambda: list_other_pods(client, need))

    def _named(self, resource: Resource, name: str, namespace: str = "") -> Answer:
        """Return the object of that name, from a list of all; without a namespace, its kind has none."""
        every = self._listed(resource, namespaced=bool(namespace))
        metas = [(each, each["metadata"]) for each in every.items]
        found = [each for each, meta in metas if (meta["name"], meta.get("namespace") or "") == (name, namespace)]
        readable = not (every.unreadable or every.not_served or every.other_versions or every.error)
        return replace(every, items=found) if found or not readable else without(resource, name)

    def _listed(self, resource: Resource, *, namespaced: bool = True) -> Answer:
        where = self._client.namespace if namespaced and not self._all_namespaces else None
        return self._once(resource, lambda: list_all(self._client, RequestTarget(resource, where)))

    def _once(self, key: Hashable, read: Callable[[], Answer]) -> Answer:
        """Return what was read under this key, or the error of the API server."""
        try:
            answer: Answer = self._lists.once(key, read)
        except ApiError as error:
            return Answer(error=one_line(error))
        return answer

    def _about(self, kind: str, key: _Key) -> Answer:
        """Return the events about an object of a kind that are not usual."""
        client, every = self._client, self._all_namespaces
        listed = self._once(
            ("events", kind),
            lambda: Answer(items=client.list_events_about(kind, without=_USUAL, all_namespaces=every)),
        )
        if kind not in self._events:
            found = self._events[kind] = defaultdict(list)
            for event in listed.items:
                about = involved(event)
                where = str(about.get("namespace") or client.namespace), kind, str(about.get("name"))
                found[where].append(event)
        return replace(listed, items=self._events[kind][key])


def _job_uid(workload: Object) -> str:
    return str((workload["metadata"].get("labels") or {}).get(labels.KUEUE_JOB_UID) or "")
