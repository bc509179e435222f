"""`flk submit`: create a job in a cluster from a script or a job file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, LoadedJob, Namespace, Timeout, note, output_format, seconds, takes_job
from flk.errors import FlkError, NoKubeconfigError, UsageError
from flk_runtime.contract.failure import ExitCode
from flk_runtime.contract.options import AUTO
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.jobs.submission import Submission
    from flk.observe.client import JobClient


@takes_job
def submit(
    loaded: LoadedJob,
    context: Context = None,
    namespace: Namespace = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the logs until the job ends, and exit with its exit code.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Create nothing: have the API server check the manifests, and check the cluster as flk doctor does.",
        ),
    ] = False,
    timeout: Timeout = None,
    output: Annotated[str, output_format("name", "json", "yaml")] = "name",
) -> int | None:
    """Train in the cluster: create a PyTorchJob (or another --target), with the code that it runs.

    Prints the job's name on stdout. Ctrl-C while following detaches; the job goes on.
    """
    limit = seconds(timeout, "--timeout")
    if limit is not None and not follow:
        raise UsageError("--timeout needs --follow", hint="--deadline limits the job itself")
    from flk.jobs import lifecycle
    from flk.jobs.submission import prepare
    from flk.observe.client import JobClient

    try:
        client = JobClient.connect(context, namespace)
    except NoKubeconfigError as error:
        error.hint += "; without a cluster, `flk run` trains on this machine and `flk render` prints the manifests"
        raise
    submission = prepare(loaded.job, loaded.root, client)
    if loaded.job.gang == AUTO:
        note(f"gang: {submission.job.gang}, by what the cluster serves")
    for sentence in submission.bundle.left_out:
        note(f"not shipped: {sentence}")
    if submission.bundle.unread:
        note(submission.bundle.unread)
    if dry_run:
        made = lifecycle.dry_run(submission.client, submission.manifests)
        _show(output, submission, made)
        _check(submission)
        note(f"{submission.name}: nothing was created (dry run); it would be a {_kind(submission)}")
        return None
    job = submission.create()
    try:
        _show(output, submission, submission.manifests)
    finally:
        _print_submission(submission, job.client)  # the job exists, also if its name cannot be written
    if not follow:
        return None
    from flk.cli.logs import follow_to_end

    return follow_to_end(job.client, job.name, job.uid, timeout=limit)


def _check(submission: Submission) -> None:
    """Print on stderr what would prevent the job from running. Raises FlkError if something does."""
    from flk.cli.doctor import with_remedies
    from flk.health.cluster import Level, Pods
    from flk.health.table import examine
    from flk.jobs.cluster import read_cluster

    pods = Pods(submission.manifests[0])
    results = examine(read_cluster(submission.client, pods), pods)
    bad = [result for result in results if result.level in (Level.FAILED, Level.WARNING)]
    for result, remedy in with_remedies(bad):
        note(f"check {result.level.value}: {result.check}: {result.found}" + f"; {remedy}" * bool(remedy))
    if any(result.level is Level.FAILED for result in bad):
        raise FlkError(f"{submission.name}: nothing was created", code=ExitCode.INFRASTRUCTURE)


def _show(output: str, submission: Submission, manifests: list[dict[str, object]]) -> None:
    from flk.manifest import text as manifest

    if output == "name":
        print(submission.name, flush=True)
    elif output == "json":
        print(manifest.to_json(manifests), end="", flush=True)
    else:
        print(manifest.to_yaml(manifests, submission.job), end="", flush=True)


def _kind(submission: Submission) -> str:
    return str(submission.manifests[0]["kind"])


def _print_submission(submission: Submission, client: JobClient) -> None:
    """Print what was created, and the next three commands, for which ``client`` knows what the job's name means."""
    job, bundle = submission.job, submission.bundle
    pods = f"{plural(job.replicas, 'pod')} with {plural(job.processes_per_pod, 'rank')}"
    pods += "" if job.replicas == 1 else " each"
    if job.elastic:
        pods += f", elastic from {job.elastic.min} to {job.elastic.max}"
    if job.spares:
        pods += f", {plural(job.spares, 'spare')}"
    where = f"namespace {client.namespace} of context {client.context}"
    note(f"created {_kind(submission)} {submission.name} in {where}: {pods}, image {job.image_or_default}")
    if bundle.code is not None:
        kilobytes = max(1, round(len(bundle.code) / 1000))
        files = len(bundle.files)
        note(f"shipped {plural(files, 'file')}, {kilobytes:,} kB compressed, sha256 {bundle.sha256[:12]}")
    if job.checkpoint is None:
        note(
            "what it saves through flk stays in the memory of the pods; --checkpoint PVC:/PATH or s3://BUCKET/PREFIX "
            "keeps it longer"
        )
    for verb, what in {
        "logs": "what every rank prints",
        "status": "what the job does, and why it ended",
        "wait": "wait until it ends, and exit with its exit code",
    }.items():
        print(f"  {client.commands.flk(verb, submission.name):<60} # {what}", file=sys.stderr)
