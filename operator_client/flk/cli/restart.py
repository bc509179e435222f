"""`flk restart`: run a job anew."""

from __future__ import annotations

from flk.cli.options import Context, JobName, Namespace, Timeout, note, open_job, seconds
from flk_runtime.contract.exit_codes import ExitCode


def restart(job: JobName, context: Context = None, namespace: Namespace = None, timeout: Timeout = None) -> int | None:
    """Run a job anew from its last checkpoint, with the same code and options. Its count of restarts begins anew.

    The pods of a job that runs get SIGTERM and their grace period, in which a job that uses flk's library saves. A job
    that has ended is deleted and created again under its name.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs import lifecycle
    from flk.jobs.submission import objects_with_uid

    client, job = open_job(job, context, namespace)
    try:
        lifecycle.restart(client, job, timeout=limit, report=note, objects_with_uid=objects_with_uid)
    except KeyboardInterrupt:
        resume = client.commands.flk("resume", job)
        note(
            f"interrupted while {job} was restarted: {client.commands.flk('status', job)} shows it; {resume} starts it"
        )
        return int(ExitCode.INTERRUPTED)
    note(f"job {job} is restarted; this shows what its ranks print: {client.commands.flk('logs', job)}")
    return None
