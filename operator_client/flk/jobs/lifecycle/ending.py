"""Watch the pods of jobs end, with a deadline and reports, as deletion and suspension both do."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.errors import FlkError, JobNotFoundError, UsageError, WaitTimeoutError
from flk.jobs.listing import in_parallel
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.follower import Follower
from flk.observe.observation import Observation
from flk.observe.pool import ReadPool
from flk.observe.reader import view_job
from flk.observe.view import JobView
from flk.targets import target_of
from flk_runtime.contract import user_env
from flk_runtime.contract.quantities import plural

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
    left = dict.fromkeys(jobs, 0)  # pods, of the jobs that are not done
    with Follower(client, jobs) as follower:
        results.update(_ends(follower, overdue))
        for seen in follower.updates(until):
            results.update(_ends(follower, overdue))
            for job, each in seen.items():
                left[job] = len(pods_left(each))
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
                    late = _late(f"{plural(left[job], 'pod')} left")
                    results[job] = _begun_with(overdue.format(name=job.name), late)
                    follower.drop(job)
            elif going_on and now - reported > REPORT_EVERY:
                reported, pods = now, sum(left[job] for job in going_on)
                whose = plural(len(going_on), "job") if are_several else going_on[0].name
                report(f"waiting for {plural(pods, 'pod') + ' of ' if pods else ''}{whose} to {awaited}")
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


def _late(text: str) -> WaitTimeoutError:
    return WaitTimeoutError(
        text, hint="a pod on a node that does not answer stays until the node is removed or is back"
    )


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
