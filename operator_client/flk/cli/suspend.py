"""`flk suspend`: end the pods of jobs and keep the jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flk.cli.options import Context, LoseProgress, Namespace, Timeout, Wait, note, seconds
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
    may_lose = chosen.may_lose(lose_progress)
    begun: set[JobRef] = set()  # without those that were suspended before
    suspended: list[JobRef] = []
    until = None if limit is None else time.monotonic() + limit

    def begin(client: JobClient, job: JobRef, tell: Tell) -> None:
        alone = wait and not chosen.are_several
        begun.add(job)
        try:
            changed = lifecycle.suspend(
                client, job.name, wait=alone, timeout=limit, report=tell, lose_progress=may_lose
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
            names = " ".join(job.word for job in chosen.jobs if job in begun)
            shown, resume = chosen.client.commands.flk("list"), chosen.client.commands.flk("resume", names)
            interrupt.args = (f"{shown} shows what is suspended; {resume} starts it again",)
        raise
