"""What a job loses when all its pods end: the progress of a job whose checkpoints only the memory of its pods has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from flk.errors import FlkError, UsageError
from flk.jobs.many import in_parallel
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.pool import ReadPool
from flk.observe.reader import view_job
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract import user_env


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
    newest = "its checkpoints are" if saved is None else f"its newest checkpoint, of step {saved}, is"
    return f"job {view.name} is at step {max(step, saved or 0)}, and {newest} {ends}"


def _keeps_nothing(view: JobView) -> bool:
    """Return whether a job has run, and checkpoints of its launchers would end with its pods."""
    ended = view.gone or {"Succeeded", "Failed"} & view.conditions.keys()
    started = any(pod.started for pod in view.pods)
    return not ended and not view.suspended and started and loses_checkpoints(view.job)


def refuse_to_lose(view: JobView, lose_progress: bool, report: Callable[[str], None]) -> None:
    """Raise UsageError if a job loses progress when its pods end, unless the user has agreed: then ``report`` it."""
    lost, again = lost_with_pods(view), "it starts again at step 0, unless its script saves elsewhere"
    if lost and not lose_progress:
        hint = "--lose-progress ends them all the same; a job that is submitted with --checkpoint keeps its progress"
        raise UsageError(f"{lost}: {again}", hint=hint)
    if lost:
        report(f"{lost}: {again}")
    elif _keeps_nothing(view):
        report(f"job {view.name} has no volume for checkpoints, and those in memory end with its pods: {again}")


def losses(client: JobClient, jobs: Sequence[JobRef]) -> Iterator[str]:
    """Yield what each job loses if all its pods end now; nothing for jobs that cannot be read or lose nothing."""

    def read(ref: JobRef) -> str:
        own = client.for_job(ref)
        job = own.get_job(ref.name)
        ended = {"Succeeded", "Failed"} & target_of(job).conditions(job).keys()
        return "" if ended or not loses_checkpoints(job) else lost_with_pods(view_job(own, ref.name))

    for _, lost in in_parallel(jobs, read, ReadPool()):
        if lost and not isinstance(lost, FlkError):
            yield lost
