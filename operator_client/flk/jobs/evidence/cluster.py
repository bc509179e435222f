"""Read what the launchers have kept of a job in a ConfigMap, as a KeptJob.

`find` combines it with what flk has kept of the job on this machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

from flk import labels
from flk.errors import FlkError
from flk.jobs.evidence.model import KeptJob
from flk.jobs.evidence.store import Store
from flk.jobs.state import Phase
from flk.kube import Object
from flk.observe.client import CONFIG_MAPS, JobClient
from flk_runtime.contract.pod_layout import CONTAINER
from flk_runtime.contract.record import KeptRecord
from flk_runtime.contract.user_env import JOB

_ENDS: Final = {"succeeded": "Succeeded", "failed": "Failed"}  # conditions of a job by the outcome of its record


def find(client: JobClient, name: str, uid: str | None = None) -> KeptJob | None:
    """Return what is kept of the job with that UID, or of the newest job of that name; None if nothing is.

    flk keeps objects, events, lines and the cause on this machine while it follows a job; the launchers keep their
    record in the cluster. Where both know the same job, the newer record and the newer lines count.
    """
    here, there = Store(client).find(name, uid), find_in_cluster(client, name, uid)
    if here is None or there is None:
        return here or there
    if here.uid != there.uid:
        return max(here, there, key=lambda kept: kept.updated)
    if there.updated <= here.updated:
        return here
    cause = None if _went_on(here, there) else here.cause
    return replace(here, record=there.record, lines=here.lines | there.lines, updated=there.updated, cause=cause)


def find_in_cluster(client: JobClient, name: str, uid: str | None = None) -> KeptJob | None:
    """Return what the launchers have kept of a job in the namespace; None if nothing is, or it may not be read."""
    try:
        found = client.api.list_all(client.target(CONFIG_MAPS), {"labelSelector": f"{labels.RECORDS}=true"})[0]
    except FlkError:
        return None
    entries = [
        (str(config_map["metadata"]["name"]), entry)
        for config_map in found
        for text in (config_map.get("data") or {}).values()
        if (entry := KeptRecord.from_json(text)) and entry.job == name and uid in (None, entry.uid)
    ]
    if not entries:
        return None
    config_map, newest = max(entries, key=lambda item: item[1].updated)
    return KeptJob(
        job=_job(newest, client.namespace),
        record=newest.record,
        lines={f"{name}-worker-0": newest.lines},
        updated=newest.updated,
        place=f"in ConfigMap {config_map}",
    )


def _went_on(here: KeptJob, there: KeptJob) -> bool:
    """Return whether the job has gone on since flk saw it: an attempt has begun or ended that flk does not know."""
    if here.cause is not None and here.cause.phase == Phase.FAILED:
        return False
    known, newer = here.record, there.record
    return newer is not None and (
        newer.outcome in _ENDS or len(newer.attempts) > (len(known.attempts) if known is not None else 0)
    )


def _job(entry: KeptRecord, namespace: str) -> Object:
    """Return a PyTorchJob with what the record says of it."""
    container = {"name": CONTAINER, "env": [{"name": JOB, "value": entry.job}]}
    worker = {"replicas": entry.pods, "template": {"spec": {"containers": [container]}}}
    condition = {"type": "Running", "status": "True", "lastTransitionTime": _time(entry.created)}
    status: dict[str, Any] = {"conditions": [condition]}
    if entry.record.outcome in _ENDS:
        condition |= {"type": _ENDS[entry.record.outcome], "lastTransitionTime": _time(entry.updated)}
        status["completionTime"] = _time(entry.updated)
    return {
        "apiVersion": labels.KUBEFLOW_API_VERSION,
        "kind": "PyTorchJob",
        "metadata": {
            "name": entry.job,
            "namespace": namespace,
            "uid": entry.uid,
            "creationTimestamp": _time(entry.created),
        },
        "spec": {"nprocPerNode": str(entry.processes), "pytorchReplicaSpecs": {"Worker": worker}},
        "status": status,
    }


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
