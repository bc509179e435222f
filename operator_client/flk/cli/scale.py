"""`flk scale`: change the number of pods of an elastic job."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, note, open_job


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(metavar="PODS", min=1, help="How many pods train.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Change the number of pods of an elastic job, within the limits of its --elastic MIN:MAX.

    Returns at once. All ranks save after the same step, and training goes on from there with the new number. This uses
    none of the job's restarts and disruptions.
    """
    from flk.jobs import lifecycle
    from flk_runtime.contract.quantities import plural

    client, job = open_job(job, context, namespace)
    before = lifecycle.scale(client, job, pods)
    if before == pods:
        note(f"job {job} has {plural(pods, 'pod')} already")
        return
    note(f"job {job} gets {plural(pods, 'pod')} in place of {before}")
    note(f"this shows how many train: {client.commands.flk('status', job)}")
