"""`flk scale`, `flk suspend`, `flk resume` and `flk restart`: change what runs of jobs that exist."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import AvoidNode, Context, JobName, LoseProgress, Namespace, Timeout, Wait, note, open_job, seconds
from flk.cli.several import Chosen, Jobs, Selector, Tell, worst
from flk.errors import FlkError

if TYPE_CHECKING:
    from flk.observe.client import JobClient, JobRef


def suspend(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    wait: Wait = True,
    timeout: Timeout = None,
    lose_progress: LoseProgress = False,
) -> int:
    """End the pods of jobs and keep the jobs, so that they can be resumed.

    The pods get SIGTERM and their grace period, in which a job that uses flk's library saves a checkpoint. The job
    holds no node until `flk resume` starts it again, at its last checkpoint in a volume or in S3. Checkpoints in memory
    end with the pods: a job that has no others is suspended only with --lose-progress. With -l, only jobs that flk has
    made are suspended.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs import lifecycle

    chosen = Chosen.of(jobs, selector, context, namespace, command="suspend", own=True)
    begun: set[JobRef] = set()  # without those that were suspended before
    suspended: list[JobRef] = []
    until = None if limit is None else time.monotonic() + limit

    def begin(client: JobClient, job: JobRef, tell: Tell) -> None:
        alone = wait and not chosen.are_several
        begun.add(job)
        try:
            changed = lifecycle.suspend(
                client, job.name, wait=alone, timeout=limit, report=tell, lose_progress=lose_progress
            )
        except FlkError:
            begun.remove(job)
            raise
        if not changed:
            begun.remove(job)
        suspended.append(job)
        state = "suspended" if changed else "suspended already"
        tell(f"job {job.name} is {state}; this starts it again: {client.commands.flk('resume', job.name)}")

    try:
        codes = [chosen.in_parallel(begin)]
        if wait and chosen.are_several:  # the pods of all jobs end at once
            left = sorted(suspended, key=chosen.jobs.index)
            for job, error in lifecycle.wait_for_all_pods_to_end(chosen.client, left, until=until, report=note):
                codes += [chosen.failed(job, error)] if error else []
        return worst(codes)
    except KeyboardInterrupt as interrupt:
        if begun:
            names = " ".join(chosen.client.word(job) for job in chosen.jobs if job in begun)
            shown, resume = chosen.client.commands.flk("list"), chosen.client.commands.flk("resume", names)
            interrupt.args = (f"{shown} shows what is suspended; {resume} starts it again",)
        raise


def resume(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
) -> int:
    """Start suspended jobs again, each at its last checkpoint in a volume or in S3.

    Their counts of restarts begin anew. With -l, only jobs that flk has made are resumed.
    """
    from flk.jobs import lifecycle

    def act(client: JobClient, job: JobRef, tell: Tell) -> None:
        state = "is resumed" if lifecycle.resume(client, job.name) else "was not suspended"
        tell(f"job {job.name} {state}; this shows what its ranks print: {client.commands.flk('logs', job.name)}")

    return Chosen.of(jobs, selector, context, namespace, command="resume", own=True).in_parallel(act)


def restart(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    timeout: Timeout = None,
    avoid: AvoidNode = None,
    lose_progress: LoseProgress = False,
) -> int:
    """Run jobs anew from their last checkpoints in a volume or in S3. Counts of restarts begin anew.

    The code and the options stay. The pods of a job that runs get SIGTERM and their grace period, in which a job that
    uses flk's library saves. Checkpoints in memory end with the pods: a job that has no others is restarted only with
    --lose-progress. A job that has ended is deleted and created again under its name. With several jobs, eight are
    restarted at a time. With -l, only jobs that flk has made are restarted. After Ctrl-C, restarts that have begun are
    finished.

    With --avoid-node, a job is deleted and created again under its name, with pods that do not run on the node. flk
    names the nodes on which pods of a job have failed repeatedly.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs import lifecycle

    chosen = Chosen.of(jobs, selector, context, namespace, command="restart", own=True)
    begun: list[str] = []

    def act(client: JobClient, job: JobRef, tell: Tell) -> None:
        begun.append(job.name)
        lifecycle.restart(
            client,
            job.name,
            timeout=limit,
            report=tell,
            avoid=avoid or [],
            lose_progress=lose_progress,
        )
        tell(f"job {job.name} is restarted; this shows what its ranks print: {client.commands.flk('logs', job.name)}")
        begun.remove(job.name)

    try:
        return chosen.in_parallel(act)
    except KeyboardInterrupt as interrupt:
        if begun:
            status, resume = (chosen.client.commands.flk(verb, " ".join(begun)) for verb in ("status", "resume"))
            left = f"{status} shows what was being restarted; {resume} starts it"
            interrupt.args = ("; ".join([*map(str, interrupt.args), left]),)
        raise


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(metavar="PODS", min=1, help="How many pods train.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
    lose_progress: Annotated[
        bool, typer.Option("--lose-progress", help="End several pods at once though only their memory has checkpoints.")
    ] = False,
) -> None:
    """Change the number of pods of an elastic job, within the limits of its --elastic MIN:MAX.

    Returns at once. All ranks save after the same step, and training goes on from there with the new number. This uses
    none of the job's restarts and disruptions. A job whose checkpoints only the memory of its pods has gives up one pod
    at a time, or several with --lose-progress: two pods that end together may hold the only copies of a shard.
    """
    from flk.jobs import lifecycle
    from flk_runtime.contract.quantities import plural

    client, job = open_job(job, context, namespace)
    before = lifecycle.scale(client, job, pods, lose_progress=lose_progress, report=note)
    if before == pods:
        note(f"job {job} has {plural(pods, 'pod')} already")
        return
    note(f"job {job} gets {plural(pods, 'pod')} in place of {before}")
    note(f"this shows how many train: {client.commands.flk('status', job)}")
