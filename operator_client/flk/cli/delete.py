"""`flk delete`: delete jobs with everything that belongs to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Namespace, Timeout, Wait, complete_jobs, job_ref, note, seconds
from flk.cli.several import Chosen, worst
from flk.errors import FlkError, UsageError
from flk.user.commands import program_name

if TYPE_CHECKING:
    from flk.jobs.lifecycle.deletion import Selection
    from flk.observe.client import JobRef


def delete(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="JOB...", help="Names of the jobs.", show_default=False, autocompletion=complete_jobs),
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all jobs of the namespace.")] = False,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", metavar="LABELS", help="Delete jobs with these labels: team=nlp.")
    ] = None,
    finished: Annotated[
        bool, typer.Option("--finished", help="Delete jobs that have succeeded or failed, and no others.")
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            metavar="DURATION",
            help="Of these, only jobs that ended before this time, or were created before it if they have not ended: "
            "12h, 7d.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the names and delete nothing.")] = False,
    wait: Wait = True,
    timeout: Timeout = None,
) -> int:
    """Delete jobs with their pods and ConfigMaps: by name, or all that --all, -l and --finished choose.

    A job that flk did not make is deleted by its name only.

    flk does not ask. It says how far a job was whose checkpoints only the memory of its pods has.

    Prints the names of the deleted jobs on stdout. Exits with 102 if there is no job of one of the names; the others
    are deleted all the same. A job that was created under the same name meanwhile is left alone.
    """
    limit = seconds(timeout, "--timeout")
    names = list(dict.fromkeys(map(job_ref, jobs or [])))
    if older_than is not None and older_than.isdecimal():  # it would delete what ended a few seconds ago
        hint = f"write {older_than}d for days, or {older_than}h, {older_than}m or {older_than}s"
        raise UsageError(f"--older-than: {older_than} has no unit", hint=hint)
    selection = _selection(names, everything, selector, finished, seconds(older_than, "--older-than"))
    from flk.jobs.lifecycle import losses
    from flk.jobs.lifecycle.deletion import delete_jobs
    from flk.observe.client import JobClient

    client = JobClient.connect(context, namespace)
    chosen = selection.chosen(client) if selection else names
    if not chosen:
        note(f"there is no such job in namespace {client.namespace}")
    several, codes = Chosen(client, chosen, by_labels=selection is not None), [0]
    for lost in losses(client, chosen):
        note(lost)
    try:
        for job, existed in delete_jobs(client, chosen, wait=wait, timeout=limit, report=note, dry_run=dry_run):
            if isinstance(existed, FlkError):
                codes.append(several.failed(job, existed))
            elif existed:
                print(job.name, flush=True)
            elif selection is None:
                codes.append(several.failed(job, client.no_job(job, explained=not several.are_several)))
    except KeyboardInterrupt as interrupt:
        if not dry_run:
            left = client.commands.flk("list")
            interrupt.args = (f"deletions that have begun go on; {left} shows the jobs that are left",)
        raise
    if dry_run:
        note("nothing was deleted (dry run)")
    return worst(codes)


def _selection(
    names: list[JobRef],
    everything: bool,
    selector: str | None,
    finished: bool,
    older_than: int | None,
) -> Selection | None:
    """Return the selection that the options describe; None for names. Raises UsageError for both and for neither."""
    from flk.jobs.lifecycle.deletion import Selection

    if selector is not None and not selector.strip():
        raise UsageError("--selector: is empty", hint="--all deletes all jobs of the namespace")
    chosen = everything or selector is not None or finished
    if names and (chosen or older_than is not None):
        raise UsageError("name jobs, or choose them with --all, -l, --finished and --older-than, but not both")
    if not names and not chosen:
        hint = f"{program_name()} delete JOB..., or --all, --finished or -l LABELS"
        if older_than is not None:
            raise UsageError("--older-than: needs --finished, --all or -l, which say what may be deleted", hint=hint)
        raise UsageError("nothing to delete was named", hint=hint)
    return Selection(selector, finished, older_than) if chosen else None
