"""Delete jobs whose TTL has passed, where the controller that has run them does not."""

from __future__ import annotations

import contextlib
from typing import Final

from flk import labels
from flk.errors import FlkError
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.targets import target_of
from flk.units import timestamp

_ENDS: Final = ("Succeeded", "Failed")


def delete_expired(client: JobClient) -> list[str]:
    """Delete the jobs of the namespace that ended longer ago than their TTL, and return their names.

    Kubernetes deletes Jobs and JobSets itself. The training operator leaves PyTorchJobs that have failed, and a
    TrainJob has no TTL. Errors are not raised: the next call tries again.
    """
    deleted: list[str] = []
    with contextlib.suppress(FlkError):
        for job in client.list_jobs(selector=labels.TTL):
            if not _is_expired(job, client.now()):
                continue
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            with contextlib.suppress(FlkError):  # the user may not delete this one, or somebody else has
                client.for_job(JobRef(name, target_of(job), uid)).delete_job(name, uid)
                deleted.append(name)
    return deleted


def _is_expired(job: Object, now: float) -> bool:
    conditions = target_of(job).conditions(job)
    ends = [timestamp(conditions[kind].get("lastTransitionTime")) for kind in _ENDS if kind in conditions]
    ttl = str(job["metadata"]["labels"][labels.TTL])
    deleted = job["metadata"].get("deletionTimestamp")
    return bool(ends and ends[0]) and ttl.isdigit() and not deleted and now - ends[0] > int(ttl)
