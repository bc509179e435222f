"""List the states of many jobs with two requests, and a third for events where pods are missing."""

from __future__ import annotations

from collections import defaultdict

from flk import labels
from flk.diagnose import Picture
from flk.jobs.client import JobClient
from flk.jobs.follower import is_owned_by
from flk.jobs.state import State, derive
from flk.kube import Object


def list_states(client: JobClient, *, all_namespaces: bool = False, selector: str | None = None) -> list[State]:
    """Return the states of the jobs of the namespace, or of all namespaces, the newest last.

    ``selector`` chooses jobs by their labels, as kubectl's does.
    """
    jobs = client.list_jobs(all_namespaces=all_namespaces, selector=selector)
    pods: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in client.list_pods(all_namespaces=all_namespaces) if jobs else []:
        pods[pod["metadata"].get("namespace", ""), _job_name(pod)].append(pod)
    own = {job["metadata"]["uid"]: _own(pods, job) for job in jobs}
    events: dict[str, list[Object]] = defaultdict(list)
    if any(_lacks_pods(job, own[job["metadata"]["uid"]]) for job in jobs):
        for event in client.list_job_events(all_namespaces=all_namespaces):
            events[str((event.get("involvedObject") or {}).get("uid"))].append(event)
    states = []
    for job in jobs:
        uid = job["metadata"]["uid"]
        states.append(derive(Picture(job, own[uid], now=client.now(), events=events[uid])))
    return sorted(states, key=lambda state: (state.created, state.namespace, state.name))


def _own(pods: dict[tuple[str, str], list[Object]], job: Object) -> list[Object]:
    meta = job["metadata"]
    return [pod for pod in pods[meta.get("namespace", ""), meta["name"]] if is_owned_by(pod, meta["uid"])]


def _lacks_pods(job: Object, pods: list[Object]) -> bool:
    """Return whether a job that should run has no pods: only events say why they were refused."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ended = any(c.get("type") in ("Succeeded", "Failed") and c.get("status") == "True" for c in conditions)
    suspended = ((job.get("spec") or {}).get("runPolicy") or {}).get("suspend")
    return not pods and not ended and not suspended


def _job_name(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(labels.OPERATOR_JOB_NAME, ""))
