"""List the states of many jobs: a request for each kind of job, and one for its pods.

Where pods are missing, events are read, and where pods find no node, the nodes.
"""

from __future__ import annotations

from collections import defaultdict

from flk.errors import ForbiddenError
from flk.health.autoscaling import AUTOSCALERS
from flk.jobs.state import State, derive
from flk.kube import Object, RequestTarget
from flk.observe.client import JobClient
from flk.observe.needs import is_about
from flk.observe.observation import Observation, event_time
from flk.observe.reader import NODES
from flk.observe.view import JobView
from flk.targets import target_of


def list_states(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[State]:
    """Return the states of the jobs of the namespace, or of all namespaces, the newest last.

    ``selector`` chooses jobs by their labels, as kubectl's does.
    """
    jobs = client.list_jobs(all_namespaces=all_namespaces, selector=selector)
    pods: dict[tuple[str, str, str], list[Object]] = defaultdict(list)
    for target in {target_of(job).name: target_of(job) for job in jobs}.values():
        for pod in client.list_all_pods(target, all_namespaces=all_namespaces):
            pods[target.name, pod["metadata"].get("namespace", ""), target.job_name(pod)].append(pod)
    by_uid = {job["metadata"]["uid"]: job for job in jobs}
    now = client.now()
    views = {uid: JobView(Observation(job, _own(pods, job), now)) for uid, job in by_uid.items()}
    unplaced = [uid for uid, view in views.items() if any(pod.reason == "Unschedulable" for pod in view.pods)]
    nodes = _nodes(client) if unplaced else {}
    of_autoscalers = client.list_events_of(AUTOSCALERS, all_namespaces=all_namespaces) if unplaced else []
    for uid in unplaced:  # whether a node could ever take its pods
        own = _own(pods, by_uid[uid])
        uids = {pod["metadata"]["uid"] for pod in own}
        said = [event for event in of_autoscalers if (event.get("involvedObject") or {}).get("uid") in uids]
        views[uid] = JobView(Observation(by_uid[uid], own, now, events=said, nodes=nodes))
    lacking = {uid: view for uid, view in views.items() if _lacks_pods(view)}
    events: dict[tuple[str, str, str], list[Object]] = defaultdict(list)
    for kind in sorted({kind for view in lacking.values() for kind, _ in view.target.event_objects("")}):
        for event in client.list_job_events(kind, all_namespaces=all_namespaces):
            about = event.get("involvedObject") or {}
            events[str(about.get("namespace") or client.namespace), kind, str(about.get("name"))].append(event)
    for uid in lacking:
        views[uid] = JobView(Observation(by_uid[uid], [], now, events=_events_of(by_uid[uid], events)))
    return sorted(map(derive, views.values()), key=lambda state: (state.created, state.namespace, state.name))


def _own(pods: dict[tuple[str, str, str], list[Object]], job: Object) -> list[Object]:
    meta, target = job["metadata"], target_of(job)
    return target.own(pods[target.name, meta.get("namespace", ""), meta["name"]], job)


def _nodes(client: JobClient) -> dict[str, Object]:
    """Return the nodes by name; none where the user may not read them."""
    try:
        found = client.api.list_all(RequestTarget(NODES))[0]
    except ForbiddenError:
        return {}
    return {node["metadata"]["name"]: node for node in found}


def _events_of(job: Object, events: dict[tuple[str, str, str], list[Object]]) -> list[Object]:
    """Return the events about a job and about the objects that its controller made, oldest first."""
    meta = job["metadata"]
    found = [
        event
        for kind, name in target_of(job).event_objects(meta["name"])
        for event in events[meta.get("namespace", ""), kind, name]
        if is_about(event, job)
    ]
    return sorted(found, key=event_time)


def _lacks_pods(view: JobView) -> bool:
    """Return whether a job that should run has no pods: only events say why they were refused."""
    return not (view.objects or view.succeeded or view.failed or view.suspended)
