"""Suspend and resume a job through its field suspend, scale it, and watch the pods of jobs end.

On the field suspend, the controller of a job deletes or creates its pods. A suspended job keeps its name, its UID and
all its objects but the pods. The pods get SIGTERM and the grace period, in which a job that uses flk's library saves.
When it is resumed, all pods are new: it starts at its last checkpoint in a volume or in S3, with no restarts used.
Checkpoints in memory end with the pods.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, JobDeletedError, JobNotFoundError, UsageError, WaitTimeoutError
from flk.jobs.listing import in_parallel
from flk.jobs.state import derive
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk.observe.pods import phase_of
from flk.observe.pool import ReadPool
from flk.observe.reader import view_job
from flk.observe.resources import resource_of
from flk.observe.view import JobView
from flk.spec import labels
from flk.spec.units import short_duration
from flk.targets import target_of
from flk_runtime.contract import user_env
from flk_runtime.contract.quantities import plural

AGAIN: Final = "it starts again at step 0, unless its script saves elsewhere"
REPORT_EVERY: Final = 5.0  # seconds between two reports while flk waits


def watch_pods_end(
    client: JobClient,
    jobs: Sequence[JobRef],
    *,
    until: float | None,
    report: Callable[[str], None],
    awaited: str,
    overdue: str,
    is_done: Callable[[JobRef, Observation], bool],
    pods_left: Callable[[Observation], Sequence[Object]] = lambda seen: seen.pods,
) -> Iterator[tuple[JobRef, FlkError | None]]:
    """Yield the jobs in their order, each when ``is_done`` says so of it, or with the error that it raises.

    ``report`` is called periodically with the number of ``pods_left`` and ``awaited``, what they still do. The error of
    a job that is not done once time.monotonic() has reached ``until`` is WaitTimeoutError, and an error of the watches
    is that of each of their jobs; these begin with ``overdue``, which has a place ``{name}`` for the name of the job.
    A job that does not exist any more is done.
    """
    reported, are_several = time.monotonic(), len(jobs) > 1
    results: dict[JobRef, FlkError | None] = {}
    left = dict.fromkeys(jobs, Observation(None))  # what was seen last of the jobs that are not done
    with Follower(client, jobs) as follower:
        for seen in follower.updates(until):
            results.update(_ends(follower, overdue))
            for job, each in seen.items():
                left[job] = each
                try:
                    if not is_done(job, each):
                        continue
                    results[job] = None
                except FlkError as error:
                    results[job] = error
                follower.drop(job)
            now, going_on = time.monotonic(), [job for job in jobs if job in follower]
            if until is not None and now >= until:
                for job in going_on:
                    kept, pods = left[job].kept_by_finalizers, len(pods_left(left[job]))
                    hint = (
                        "controllers remove finalizers; kubectl edit removes one whose controller is gone"
                        if kept
                        else "a pod on a node that does not answer stays until the node is removed or is back"
                    )
                    late = WaitTimeoutError(f"{plural(pods, 'pod')} left{kept}", hint=hint)
                    results[job] = _begun_with(overdue.format(name=job.name), late)
                    follower.drop(job)
            elif going_on and now - reported > REPORT_EVERY:
                reported, pods = now, sum(len(pods_left(left[job])) for job in going_on)
                whose = plural(len(going_on), "job") if are_several else going_on[0].name
                report(
                    f"waiting for {plural(pods, 'pod') + ' of ' if pods else ''}{whose} to {awaited}"
                    + ("" if are_several else left[going_on[0]].kept_by_finalizers)
                )
            while jobs and jobs[0] in results:
                yield jobs[0], results[jobs[0]]
                jobs = jobs[1:]
        results.update(_ends(follower, overdue))
    yield from ((job, results[job]) for job in jobs)


def _ends(follower: Follower, overdue: str) -> dict[JobRef, FlkError | None]:
    """Return the results of the jobs that are not followed any more: of those that do not exist, no error."""
    return {
        job: None if isinstance(error, JobNotFoundError) else _begun_with(overdue.format(name=job.name), error)
        for job, error in follower.take_errors().items()
    }


def _begun_with(overdue: str, error: FlkError) -> FlkError:
    """Return the error with what goes on all the same before its text."""
    told = copy.copy(error)
    told.args = (f"{overdue}: {error}",)
    return told


def loses_checkpoints(job: Object) -> bool:
    """Return whether the launchers of a job keep its checkpoints in its pods only, as far as its manifest tells."""
    for role in target_of(job).replicas(job).values():
        spec = role.template.get("spec") or {}
        ends = {volume["name"] for volume in spec.get("volumes") or [] if "emptyDir" in volume}
        for container in spec.get("containers") or []:
            folder = [v.get("value") for v in container.get("env") or [] if v.get("name") == user_env.CHECKPOINT]
            for mount in container.get("volumeMounts") or []:
                if mount["name"] in ends and folder[-1:] == [mount["mountPath"]]:
                    return True
    return False


def lost_with_pods(view: JobView) -> str:
    """Return what a job loses if all its pods end now, as a sentence; empty: nothing, as far as it has told.

    That a script saves nothing, or saves elsewhere by itself, is not known here: its steps are told, too.
    """
    if not _keeps_nothing(view):
        return ""
    ends = "only in the memory of its pods, which ends with them"
    if view.unread_record and not view.record:
        return f"the checkpoints of job {view.name} are {ends}, and how far it is cannot be read: {view.unread_record}"
    saved = view.record.saved if view.record else None
    step = max((progress.step for progress in view.seen.progress), default=saved)
    if not step:
        return ""
    told = f" as of {short_duration(view.now - view.goodput.until)} ago" if view.goodput else ""
    newest = "its checkpoints are" if saved is None else f"its newest checkpoint, of step {saved}{told}, is"
    return f"job {view.name} is at step {max(step, saved or 0)}, and {newest} {ends}"


def _keeps_nothing(view: JobView) -> bool:
    """Return whether a job has run, and checkpoints of its launchers would end with its pods."""
    if view.gone or view.has_end_condition or view.suspended:
        return False
    return any(pod.started for pod in view.pods) and loses_checkpoints(view.job)


def refuse_to_lose(view: JobView, lose_progress: bool, report: Callable[[str], None]) -> None:
    """Raise UsageError if a job loses progress when its pods end, unless the user has agreed: then ``report`` it."""
    lost = lost_with_pods(view)
    if lost and not lose_progress:
        hint = "--lose-progress ends them all the same; a job that is submitted with --checkpoint keeps its progress"
        raise UsageError(f"{lost}: {AGAIN}", hint=hint)
    if lost:
        report(f"{lost}: {AGAIN}")
    elif _keeps_nothing(view):
        report(f"job {view.name} has no volume for checkpoints, and those in memory end with its pods: {AGAIN}")


def losses(client: JobClient, jobs: Sequence[JobRef]) -> Iterator[str]:
    """Yield what each job loses if all its pods end now; nothing for jobs that cannot be read or lose nothing."""

    def read(ref: JobRef) -> str:
        own = client.for_job(ref)
        job = own.get_job(ref.name)
        return "" if end_of(job) or not loses_checkpoints(job) else lost_with_pods(view_job(own, ref.name))

    for _, lost in in_parallel(jobs, read, ReadPool()):
        if lost and not isinstance(lost, FlkError):
            yield lost


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
    changed = not target_of(job).suspended(job)
    if changed:
        if loses_checkpoints(job):
            refuse_to_lose(view_job(client, name), lose_progress, report)
        set_suspended(client, job, True)
    if wait:
        wait_for_pods_to_end(client, job, timeout=timeout, report=report)
    return changed


def resume(client: JobClient, name: str) -> bool:
    """Let a suspended job start again. Return whether it was suspended.

    Raises UsageError if the job has ended, if Kueue manages it, or if not all of its objects were created.
    """
    job = changeable_job(client, name)
    refuse_incomplete(client, job)
    suspended = target_of(job).suspended(job)
    if suspended:
        set_suspended(client, job, False)
    return suspended


def set_suspended(client: JobClient, job: Object, suspended: bool) -> None:
    """Set or clear the field suspend of exactly this job. Raises ConflictError if another has its name now."""
    change_job(client, job, target_of(job).suspension(True) if suspended else starting(client, job))


def change_job(client: JobClient, job: Object, change: Object) -> Object:
    """Change exactly this job by a merge patch, and return it. Raises ConflictError if another has its name now."""
    meta, body = job["metadata"], {"metadata": {}, **change}
    body["metadata"] = {"uid": meta["uid"], **body["metadata"]}
    return client.api.call("patch", client.target(resource_of(job), meta["name"]), body=body)


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


def queue_of(job: Object) -> str:
    """Return the name of the Kueue queue of the job; empty if it is in none."""
    return str(labels.of(job).get(labels.QUEUE) or "")


def end_of(job: Object) -> str:
    """Return how the job has ended by its controller: ``Succeeded`` or ``Failed``; empty if it has not."""
    return next((end for end in ("Succeeded", "Failed") if end in target_of(job).conditions(job)), "")


def refuse_incomplete(client: JobClient, job: Object) -> None:
    """Raise UsageError if not all objects of a job were created."""
    name = job["metadata"]["name"]
    if labels.INCOMPLETE in labels.annotations_of(job):
        raise UsageError(
            f"job {name} cannot start: its submission was interrupted, and objects that it needs do not exist",
            hint=f"delete it, then submit again: {client.commands.flk('delete', name)}",
        )


def refuse_deleted(client: JobClient, job: Object) -> None:
    """Raise UsageError if somebody has deleted the job, whose pods and then it itself end."""
    if job["metadata"].get("deletionTimestamp"):
        name = job["metadata"]["name"]
        raise UsageError(
            f"job {name} is being deleted: it cannot start or stop any more",
            hint=f"{client.commands.flk('delete', name)} waits until it is gone; then it can be submitted again",
        )


def refuse_ended(client: JobClient, job: Object) -> None:
    """Raise UsageError if the job has ended."""
    if end := end_of(job):
        name = job["metadata"]["name"]
        raise UsageError(
            f"job {name} has ended ({end}): only a job that has not can be suspended and resumed",
            hint=f"this runs it again: {client.commands.again(name, queue_of(job))}",
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
    """Return a job that may change. Raises UsageError for others, with the reason, and JobNotFoundError."""
    job = client.get_job(name)
    refuse_deleted(client, job)
    refuse_ended(client, job)
    if queue := queue_of(job):
        raise UsageError(
            f"job {name} is in queue {queue}: Kueue decides when it runs, and would undo this",
            hint=stopping_hint(client),
        )
    return job


def scale(
    client: JobClient,
    name: str,
    pods: int,
    *,
    lose_progress: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> int:
    """Give a job ``pods`` pods. Return how many it should have had before.

    Raises UsageError if the job is not elastic, has ended, is in a queue, is of a kind whose number of pods is fixed,
    may not have as many pods, or loses progress without ``lose_progress``, as in `suspend`, and JobNotFoundError if
    there is none.
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
    if not target_of(job).scalable:
        raise UsageError(
            f"job {name} is a {state.kind}, which cannot change its number of pods",
            hint="submit it with --target job: the pods of a Job of Kubernetes can become more and fewer",
        )
    if state.replicas - pods > 1 and loses_checkpoints(job):
        refuse_to_lose(view_job(client, name), lose_progress, report)
    if pods != state.replicas:
        change_job(client, job, target_of(job).scaling(job, pods))
    return state.replicas
