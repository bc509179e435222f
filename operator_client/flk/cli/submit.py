"""`flk submit`: a PyTorchJob out of a script."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Loaded, Namespace, Timeout, note, seconds, takes_job
from flk.errors import UsageError
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.jobs.handle import Plan


@takes_job
def submit(
    loaded: Loaded,
    context: Context = None,
    namespace: Namespace = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on to the logs, and end with the job's exit code.")
    ] = False,
    dry_run: Annotated[
        str | None,
        typer.Option("--dry-run", metavar="WHERE", help="Create nothing. client: show it; server: have it checked."),
    ] = None,
    timeout: Timeout = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FORMAT", help="What stdout gets: name, json or yaml.")
    ] = "name",
) -> int | None:
    """Train in the cluster: create a PyTorchJob, with the code that it runs.

    Prints the job's name on stdout. Ctrl-C while following detaches; the job goes on.
    """
    if output not in ("name", "json", "yaml"):
        raise UsageError(f"--output: must be name, json or yaml (is {output!r})")
    if dry_run not in (None, "client", "server"):
        raise UsageError(f"--dry-run: must be client or server (is {dry_run!r})")
    limit = seconds(timeout, "--timeout")
    if limit is not None and not follow:
        raise UsageError("--timeout needs --follow", hint="--deadline limits the job itself")
    from flk.jobs import handle
    from flk.jobs.client import JobClient

    plan = handle.plan(loaded.job, loaded.root, JobClient.connect(context, namespace))
    for sentence in plan.shipment.left_out:
        note(f"not shipped: {sentence}")
    if dry_run:
        made = plan.manifests if dry_run == "client" else plan.cluster.try_job(plan.manifests)
        note(f"{plan.name}: nothing was created (dry run)")
        _show(output, plan, made)
        return None
    try:
        run = plan.create()
    except KeyboardInterrupt:
        note(f"interrupted while {plan.name} was created: flk status {plan.name} tells whether it is there")
        return int(ExitCode.INTERRUPTED)
    _show(output, plan, plan.manifests)
    _tell(plan)
    if not follow:
        return None
    from flk.cli.logs import follow as show

    return show(run.cluster, run.name, run.uid, timeout=limit)


def _show(output: str, plan: Plan, manifests: list[dict[str, object]]) -> None:
    from flk.manifest import text as manifest

    if output == "name":
        print(plan.name, flush=True)
    elif output == "json":
        print(manifest.to_json(manifests), end="", flush=True)
    else:
        print(manifest.to_yaml(manifests, plan.job), end="", flush=True)


def _tell(plan: Plan) -> None:
    """What was made, and the next three commands."""
    job, shipment, place = plan.job, plan.shipment, plan.cluster.namespace
    pods = f"{job.replicas} pod{'s' * (job.replicas != 1)} with {job.processes_per_pod} rank"
    pods += f"{'s' * (job.processes_per_pod != 1)}{' each' * (job.replicas != 1)}"
    where = f"namespace {place} of context {plan.cluster.context}"
    note(f"created job {plan.name} in {where}: {pods}, image {job.image_or_default}")
    if shipment.code is not None:
        kilobytes = max(1, round(len(shipment.code) / 1000))
        files = len(shipment.files)
        note(f"shipped {files} file{'s' * (files != 1)}, {kilobytes:,} kB compressed, sha256 {shipment.sha256[:12]}")
    if job.checkpoint is None:
        note("snapshots live as long as their pod; --checkpoint CLAIM:/PATH keeps them")
    for verb, what in {
        "logs": "what every rank prints",
        "status": "what it does, and why it ended",
        "wait": "until it ends, with its exit code",
    }.items():
        print(f"  {f'flk {verb} {plan.name} -n {place}':<60} # {what}", file=sys.stderr)
