"""`flk suspend`: end a job's pods and keep the job."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, Timeout, note, open_job, seconds


def suspend(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the pods are gone (default), or return at once.")
    ] = True,
    timeout: Timeout = None,
) -> None:
    """End the pods of a job and keep the job, so that it can be resumed.

    The pods get SIGTERM and their grace period, in which a job that uses flk's library saves a checkpoint. The job
    holds no node until `flk resume` starts it again, at its last checkpoint in a volume or in S3: those in memory end
    with the pods.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs import lifecycle

    client, job = open_job(job, context, namespace)
    changed = lifecycle.suspend(client, job, wait=wait, timeout=limit, report=note)
    state = "suspended" if changed else "suspended already"
    note(f"job {job} is {state}; this starts it again: {client.commands.flk('resume', job)}")
