"""`flk resume`: start a suspended job again."""

from __future__ import annotations

from flk.cli.options import Context, JobName, Namespace, note, open_job


def resume(job: JobName, context: Context = None, namespace: Namespace = None) -> None:
    """Start a suspended job again, at its last checkpoint. Its count of restarts begins anew."""
    from flk.jobs import lifecycle

    client, job = open_job(job, context, namespace)
    resumed = lifecycle.resume(client, job)
    state = "is resumed" if resumed else "was not suspended"
    note(f"job {job} {state}; this shows what its ranks print: {client.commands.flk('logs', job)}")
