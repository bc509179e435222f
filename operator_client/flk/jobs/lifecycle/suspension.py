"""Suspend and resume a job through spec.runPolicy.suspend, on which the training operator deletes or creates its pods.

A suspended job keeps its name, its UID and all its objects but the pods. The pods get SIGTERM and the grace period, in
which a job that uses flk's library saves. When it is resumed, all pods are new: it starts at its last checkpoint, with
no restarts used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from flk import labels
from flk.errors import JobDeletedError, UsageError, WaitTimeoutError
from flk.jobs.client import JOBS, JobClient
from flk.jobs.follower import Follower
from flk.kube import Object
from flk.units import plural

REPORT_EVERY: Final = 5.0  # seconds between two reports of what is awaited


def suspend(client: JobClient, name: str, *, wait: bool, timeout: float | None, report: Callable[[str], None]) -> bool:
    """Suspend a job, and with ``wait`` return when its pods are gone. Return whether it was not suspended before.

    ``report`` is called with a line while flk waits. Raises UsageError if the job has ended or Kueue manages it,
    JobNotFoundError if there is none, and WaitTimeoutError if pods are left after ``timeout`` seconds.
    """
    job = client.get_job(name)
    refuse_ended(client, job)
    _refuse_queued(job)
    changed = not is_suspended(job)
    if changed:
        set_suspended(client, job, True)
    if wait:
        wait_for_pods_to_end(client, job, timeout=timeout, report=report)
    return changed


def resume(client: JobClient, name: str) -> bool:
    """Let a suspended job start again. Return whether it was suspended.

    Raises UsageError if the job has ended, if Kueue manages it, or if not all of its objects were created.
    """
    job = client.get_job(name)
    refuse_ended(client, job)
    _refuse_queued(job)
    if labels.INCOMPLETE in (job["metadata"].get("annotations") or {}):
        raise UsageError(
            f"job {name} cannot start: its submission was interrupted, and objects that it needs do not exist",
            hint=f"delete it, then submit again: {client.command('delete', name)}",
        )
    if not is_suspended(job):
        return False
    set_suspended(client, job, False)
    return True


def set_suspended(client: JobClient, job: Object, suspended: bool) -> None:
    """Set or clear spec.runPolicy.suspend of exactly this job. Raises ConflictError if another has its name now."""
    meta = job["metadata"]
    change = {"metadata": {"uid": meta["uid"]}, "spec": {"runPolicy": {"suspend": suspended}}}
    client.api.call("patch", client.target(JOBS, meta["name"]), body=change)


def is_suspended(job: Object) -> bool:
    """Return whether the job's spec says that it is suspended."""
    return bool(_run_policy(job).get("suspend"))


def queue_of(job: Object) -> str:
    """Return the name of the Kueue queue of the job; empty if it is in none."""
    return str((job["metadata"].get("labels") or {}).get(labels.QUEUE) or "")


def end_of(job: Object) -> str:
    """Return how the job has ended by the training operator: ``Succeeded`` or ``Failed``; empty if it has not."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ended = {c.get("type") for c in conditions if c.get("status") == "True"}
    return next((word for word in ("Succeeded", "Failed") if word in ended), "")


def refuse_ended(client: JobClient, job: Object) -> None:
    """Raise UsageError if the job has ended."""
    if end := end_of(job):
        name = job["metadata"]["name"]
        raise UsageError(
            f"job {name} has ended ({end}): only a job that has not can be suspended and resumed",
            hint=f"this runs it again: {client.command('restart', name)}",
        )


def wait_for_pods_to_end(
    client: JobClient, job: Object, *, timeout: float | None, report: Callable[[str], None]
) -> None:
    """Return when a suspended job has no pods.

    Raises WaitTimeoutError after ``timeout`` seconds, JobDeletedError if it was deleted, UsageError if it has ended.
    """
    name, began = job["metadata"]["name"], time.monotonic()
    reported = began
    with Follower(client, name, job["metadata"]["uid"]) as follower:
        for seen in follower.updates(interval=0.5):
            if seen.job is None:
                raise JobDeletedError(f"job {name} was deleted while its pods ended")
            if not seen.pods:
                return
            refuse_ended(client, seen.job)
            now, left = time.monotonic(), plural(len(seen.pods), "pod")
            if timeout is not None and now - began >= timeout:
                raise WaitTimeoutError(
                    f"job {name} is suspended, and {left} of it have not ended yet",
                    hint="a pod on a node that does not answer stays until the node is removed or is back",
                )
            if now - reported > REPORT_EVERY:
                reported = now
                report(f"waiting for {left} of {name} to save and end")


def _run_policy(job: Object) -> dict[str, Any]:
    return (job.get("spec") or {}).get("runPolicy") or {}


def _refuse_queued(job: Object) -> None:
    queue = queue_of(job)
    if queue:
        workload = "kubectl get workloads.kueue.x-k8s.io shows its Workload, whose spec.active: false stops it"
        raise UsageError(
            f"job {job['metadata']['name']} is in queue {queue}: Kueue decides when it runs, and would undo this",
            hint=workload,
        )
