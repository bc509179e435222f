"""Suspend and resume a job through its field suspend, on which its controller deletes or creates its pods.

A suspended job keeps its name, its UID and all its objects but the pods. The pods get SIGTERM and the grace period, in
which a job that uses flk's library saves. When it is resumed, all pods are new: it starts at its last checkpoint in a
volume or in S3, with no restarts used. Checkpoints in memory end with the pods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from flk import labels
from flk.errors import FlkError, JobDeletedError, UsageError
from flk.jobs.lifecycle.ending import loses_checkpoints, refuse_to_lose, watch_pods_end
from flk.jobs.lifecycle.placement import (
    avoiding,
    change_job,
    place,
    quarantined,
    refuse_other_nodes,
    report_absent,
)
from flk.jobs.state import derive
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.observation import Observation
from flk.observe.pods import phase_of
from flk.observe.reader import view_job
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract.quantities import plural


def suspend(
    client: JobClient,
    name: str,
    *,
    wait: bool,
    timeout: float | None,
    report: Callable[[str], None],
    lose_progress: bool = False,
) -> bool:
    """Suspend a job, and with ``wait`` return when its pods are gone. Return whether it was not suspended before.

    ``report`` is called with a line while flk waits, and with what the job loses. Raises UsageError if the job has
    ended or Kueue manages it, or if it loses progress without ``lose_progress``, JobNotFoundError if there is none, and
    WaitTimeoutError if pods are left after ``timeout`` seconds.
    """
    job = changeable_job(client, name)
    changed = not is_suspended(job)
    if changed:
        if loses_checkpoints(job):
            refuse_to_lose(view_job(client, name), lose_progress, report)
        set_suspended(client, job, True)
    if wait:
        wait_for_pods_to_end(client, job, timeout=timeout, report=report)
    return changed


def resume(
    client: JobClient, name: str, *, avoid: Sequence[str] = (), report: Callable[[str], None] = lambda text: None
) -> bool:
    """Let a suspended job start again. Return whether it was suspended.

    Pods that are made from now on avoid the nodes ``avoid``, and those of a suspended job nodes in quarantine where
    others have room. Raises UsageError if the job has ended, if Kueue manages it, if not all of its objects were
    created, or if its pods cannot be given other nodes.
    """
    job = changeable_job(client, name)
    refuse_incomplete(client, job)
    suspended = is_suspended(job)
    if avoid and not target_of(job).placeable:
        refuse_other_nodes(client, job, avoid)
    report_absent(client, avoid, report)
    placed = avoiding(job, avoid, quarantined(view_job(client, name), report) if suspended else [])
    if target_of(job).placeable:
        place(client, job, placed)
    elif placed != job:
        report(f"pods of a {job['kind']} may start there again; {client.commands.flk('restart', name)} creates it anew")
    if suspended:
        set_suspended(client, job, False)
    return suspended


def set_suspended(client: JobClient, job: Object, suspended: bool) -> None:
    """Set or clear the field suspend of exactly this job. Raises ConflictError if another has its name now."""
    change_job(client, job, target_of(job).suspension(True) if suspended else starting(client, job))


def starting(client: JobClient, job: Object) -> Object:
    """Return the merge patch that lets a job start now, from when its deadline and its attempts count."""
    target = target_of(job)
    change = target.suspension(False)
    merge(change, target.start_mark(job, f"{client.now():.0f}"))
    return change


def merge(base: Object, change: Object) -> None:
    """Put ``change`` into ``base``, as an API server applies a merge patch that removes nothing."""
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value


def is_suspended(job: Object) -> bool:
    """Return whether the job's spec says that it is suspended."""
    return target_of(job).suspended(job)


def queue_of(job: Object) -> str:
    """Return the name of the Kueue queue of the job; empty if it is in none."""
    return str(labels.of(job).get(labels.QUEUE) or "")


def end_of(job: Object) -> str:
    """Return how the job has ended by its controller: ``Succeeded`` or ``Failed``; empty if it has not."""
    ended = target_of(job).conditions(job)
    return next((word for word in ("Succeeded", "Failed") if word in ended), "")


def refuse_incomplete(client: JobClient, job: Object) -> None:
    """Raise UsageError if not all objects of a job were created."""
    name = job["metadata"]["name"]
    if labels.INCOMPLETE in labels.annotations_of(job):
        raise UsageError(
            f"job {name} cannot start: its submission was interrupted, and objects that it needs do not exist",
            hint=f"delete it, then submit again: {client.commands.flk('delete', name)}",
        )


def refuse_ended(client: JobClient, job: Object) -> None:
    """Raise UsageError if the job has ended."""
    if end := end_of(job):
        name = job["metadata"]["name"]
        raise UsageError(
            f"job {name} has ended ({end}): only a job that has not can be suspended and resumed",
            hint=f"this runs it again: {client.commands.flk('restart', name)}",
        )


def wait_for_pods_to_end(
    client: JobClient, job: Object, *, timeout: float | None, report: Callable[[str], None]
) -> None:
    """Return when a suspended job has no pods but such as have ended before.

    Raises WaitTimeoutError after ``timeout`` seconds, JobDeletedError if it was deleted, UsageError if it has ended.
    """
    own = JobRef(job["metadata"]["name"], target_of(job), job["metadata"]["uid"])
    until = None if timeout is None else time.monotonic() + timeout
    for _, error in wait_for_all_pods_to_end(client, [own], until=until, report=report):
        if error is not None:
            raise error


def wait_for_all_pods_to_end(
    client: JobClient, jobs: Sequence[JobRef], *, until: float | None, report: Callable[[str], None]
) -> Iterator[tuple[JobRef, FlkError | None]]:
    """Yield suspended jobs in their order, each when its pods are gone, or with the error of `wait_for_pods_to_end`."""
    return watch_pods_end(
        client,
        jobs,
        until=until,
        report=report,
        awaited="save and end",
        overdue="job {name} is suspended, and its pods have not ended yet",
        is_done=lambda job, seen: _has_stopped(client, job.name, seen),
        pods_left=_pods_left,
    )


def _has_stopped(client: JobClient, name: str, seen: Observation) -> bool:
    if seen.job is None or seen.gone is not None:
        raise JobDeletedError(f"job {name} was deleted while its pods ended")
    if seen.pods:
        refuse_ended(client, seen.job)
    return not _pods_left(seen)


def _pods_left(seen: Observation) -> list[Object]:
    """Return the pods but those that have ended and that the controller of a suspended job keeps."""
    if seen.job is None or not target_of(seen.job).keeps_ended:
        return list(seen.pods)
    ended = ("Succeeded", "Failed")
    return [pod for pod in seen.pods if pod["metadata"].get("deletionTimestamp") or phase_of(pod) not in ended]


def stopping_hint(client: JobClient) -> str:
    """Return a hint that says how to stop a job that Kueue manages."""
    shown = client.commands.kubectl("get workloads.kueue.x-k8s.io")
    return f"{shown} shows its Workload, whose spec.active: false stops it, and true has the queue start it again"


def changeable_job(client: JobClient, name: str) -> Object:
    """Return a job. Raises UsageError if it has ended, or Kueue decides when it runs, and JobNotFoundError."""
    job = client.get_job(name)
    refuse_ended(client, job)
    if queue := queue_of(job):
        raise UsageError(
            f"job {name} is in queue {queue}: Kueue decides when it runs, and would undo this",
            hint=stopping_hint(client),
        )
    return job


def scale(client: JobClient, name: str, pods: int) -> int:
    """Give a job ``pods`` pods. Return how many it should have had before.

    Raises UsageError if the job is not elastic, has ended, is in a queue, or may not have as many pods, and
    JobNotFoundError if there is none.
    """
    job = changeable_job(client, name)
    state = derive(JobView(Observation(job)))
    if state.min_size >= state.max_size:
        raise UsageError(
            f"job {name} is not elastic: it trains with {plural(state.max_size - state.spares, 'pod')} and no others",
            hint="submit it with --elastic MIN:MAX, as in --elastic 2:4",
        )
    if not state.min_size <= pods <= state.max_size:
        raise UsageError(f"PODS: must be from {state.min_size} to {state.max_size} for job {name} (is {pods})")
    if pods != state.replicas:
        change_job(client, job, target_of(job).scaling(job, pods))
    return state.replicas
