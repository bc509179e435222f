"""List the states of many jobs with two requests."""

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
    states = []
    for job in jobs:
        meta = job["metadata"]
        own = [pod for pod in pods[meta.get("namespace", ""), meta["name"]] if is_owned_by(pod, meta["uid"])]
        states.append(derive(Picture(job, own, now=client.now())))
    return sorted(states, key=lambda state: (state.created, state.namespace, state.name))


def _job_name(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(labels.OPERATOR_JOB_NAME, ""))
