"""List the states of many jobs: a request for each kind of job, and one for its pods.

What else a job needs is read for all jobs at once: the events where pods are missing, and where pods find no node, the
nodes and the events of autoscalers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from flk.errors import ForbiddenError
from flk.health.autoscaling import AUTOSCALERS
from flk.jobs.state import JobList, State, derive
from flk.kube import Object, RequestTarget
from flk.observe.client import JobClient
from flk.observe.needs import Answer, needs, with_answer
from flk.observe.observation import Need, Observation, involved
from flk.observe.resources import NODES
from flk.observe.view import JobView
from flk.targets import target_of

_Key = tuple[str, str, str]  # namespace, kind and name of an object


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
    pods: dict[_Key, list[Object]] = defaultdict(list)
    for target in {target_of(job).name: target_of(job) for job in jobs}.values():
        for pod in client.list_all_pods(target, all_namespaces=all_namespaces):
            pods[pod["metadata"].get("namespace", ""), target.kind, target.job_name(pod)].append(pod)
    answers, now = _Answers(client, all_namespaces), client.now()
    found = []
    for job in jobs:
        target, meta = target_of(job), job["metadata"]
        own = target.own(pods[meta.get("namespace", ""), target.kind, meta["name"]], job)
        view = answers.complete(Observation(job, own, now))
        found.append(Listed(view.around, derive(view)))
    return sorted(found, key=lambda each: (each.state.created, each.state.namespace, each.state.name))


class _Answers:
    """Answers what jobs need from lists that are read once for all of them."""

    def __init__(self, client: JobClient, all_namespaces: bool) -> None:
        self._client = client
        self._all_namespaces = all_namespaces
        self._events: dict[str, dict[_Key, list[Object]]] = {}  # by kind of the objects that they are about

    def complete(self, seen: Observation) -> JobView:
        """Return the view of the observation with the answers to the requests that a list of jobs makes."""
        view = JobView(seen)
        while wanted := [need for need in needs(view) if need.what == "events" or need == Need("nodes")]:
            for need in wanted:
                seen = with_answer(seen, need, self._answer(need, view))
            view = JobView(seen)
        return view

    def _answer(self, need: Need, view: JobView) -> Answer:
        if need.what == "nodes":
            return self._nodes
        # A list reads why a job has no pods, and whether pods without a node may get one.
        if (need.kind == "Pod" and not view.unschedulable) or (need.kind != "Pod" and view.objects):
            return Answer()
        return Answer(items=self._about(need.kind)[view.namespace, need.kind, need.name])

    def _about(self, kind: str) -> dict[_Key, list[Object]]:
        """Return the warnings about objects of a kind; of pods, the events of autoscalers."""
        if kind not in self._events:
            found = self._events[kind] = defaultdict(list)
            listed = (
                self._client.list_events_of(AUTOSCALERS, all_namespaces=self._all_namespaces)
                if kind == "Pod"
                else self._client.list_job_events(kind, all_namespaces=self._all_namespaces)
            )
            for event in listed:
                about = involved(event)
                key = str(about.get("namespace") or self._client.namespace), kind, str(about.get("name"))
                found[key].append(event)
        return self._events[kind]

    @cached_property
    def _nodes(self) -> Answer:
        """All nodes; none where the user may not read them."""
        try:
            return Answer(items=self._client.api.list_all(RequestTarget(NODES))[0])
        except ForbiddenError:
            return Answer()
