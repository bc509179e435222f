"""Many jobs at a glance: two requests, however many jobs there are."""

from __future__ import annotations

from collections import defaultdict

from flk.jobs import state as states
from flk.jobs.client import JobClient
from flk.jobs.follower import owned_by
from flk.jobs.state import State
from flk.kube.resources import Object


def all_jobs(cluster: JobClient, *, everywhere: bool = False) -> list[State]:
    """The states of all jobs of the namespace, or of all namespaces, the newest last."""
    jobs = cluster.jobs(everywhere=everywhere)
    pods: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in cluster.pods(everywhere=everywhere) if jobs else []:
        pods[pod["metadata"].get("namespace", ""), states.job_of(pod)].append(pod)
    found = []
    for job in jobs:
        meta = job["metadata"]
        mine = [pod for pod in pods[meta.get("namespace", ""), meta["name"]] if owned_by(pod, meta["uid"])]
        found.append(states.derive(job, mine, now=cluster.now()))
    return sorted(found, key=lambda state: (state.created, state.namespace, state.name))
