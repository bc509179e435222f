"""The commands that start a job, `flk submit`, `flk render` and `flk run`, and those that make its file."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, LoadedJob, Namespace, note, output_format, takes_job
from flk.errors import FlkError, NoKubeconfigError, UsageError
from flk.user.terminal import print_error
from flk_runtime.contract import ExitCode
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
) -> int | None:
    """Train in the cluster: create a job of the kind that the cluster serves (--target), with the code that it runs.

    Prints the job's name on stdout. Ctrl-C while following detaches; the job goes on.
    """
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
        lifecycle.dry_run(submission.client, submission.manifests)
        print(submission.name, flush=True)
        _check(submission)
        note(f"{submission.name}: nothing was created (dry run); it would be a {submission.manifests[0]['kind']}")
        return None
    job = submission.create()
    try:
        print(submission.name, flush=True)
    finally:
        _print_submission(submission, job.client)  # the job exists, also if its name cannot be written
    if not follow:
        return None
    from flk.cli.logs import follow_to_end

    return follow_to_end(job.client, job.name, job.uid)


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
    note(
        f"created {submission.manifests[0]['kind']} {submission.name} in {where}: {pods}, image {job.image_or_default}"
    )
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


@takes_job
def render(
    loaded: LoadedJob,
    namespace: Namespace = None,
    output: Annotated[str, output_format("yaml", "json")] = "yaml",
    no_runtime: Annotated[
        bool, typer.Option("--no-runtime", help="Leave out flk's runtime, which the chart brings: for job.manifest.")
    ] = False,
) -> None:
    """Print the manifests of a job as YAML on stdout: of a PyTorchJob, if the job names no target.

    This command does not use a cluster, so the defaults of a namespace are not applied. A job without a name gets a
    generated one, as with `flk submit`. `kubectl create` takes the manifests, as does `kubectl apply --server-side`.
    Without this option, kubectl apply keeps a copy in an annotation, which is too small for flk's runtime. Delete with
    kubectl what it has created: `flk delete` leaves such ConfigMaps, since the job does not own them.
    """
    from flk import manifest
    from flk.manifest.render import note_on_apply
    from flk_runtime.contract import pod_layout

    job = loaded.job.named()
    bundle = manifest.make_bundle(job, loaded.root)
    for sentence in bundle.left_out:
        note(f"not shipped: {sentence}")
    if bundle.unread:
        note(bundle.unread)
    manifests = manifest.render(job, bundle, namespace=namespace)
    if no_runtime:
        manifests = [m for m in manifests if pod_layout.RUNTIME_ARCHIVE not in (m.get("binaryData") or {})]
    if unapplied := note_on_apply(manifests):
        note(unapplied)
    print(manifest.to_json(manifests) if output == "json" else manifest.to_yaml(manifests, job), end="")


_ENDS = {int(ExitCode.DONE): "succeeded", int(ExitCode.INTERRUPTED): "was interrupted"}


@partial(takes_job, here=True)
def run(
    loaded: LoadedJob,
    check: Annotated[
        bool, typer.Option("--check", help="Start the ranks, compare their reports, do one all-reduce and exit.")
    ] = False,
) -> int:
    """Train on this machine, with the environment of the pods: one launcher for each replica.

    The exit code is the job's. Ctrl-C ends all processes, a second Ctrl-C kills them.
    """
    from flk.local.places import checkpoint_place
    from flk.local.run import LocalRun, as_check

    job, here = loaded.job.named(), Path.cwd()
    if check:
        checked = LocalRun(as_check(job), here)
        exit_code = checked.run()
        if failure := checked.shown.failure(str(job.name)):
            print_error(failure)
        return exit_code
    if job.volumes:
        note(f"volumes are not mounted on this machine: {', '.join(job.volumes)}")
    job = LoadedJob(job, loaded.root).started_in(here)
    place = checkpoint_place(job, here)
    shown = place.relative_to(here) if isinstance(place, Path) else place
    kept = f"checkpoints in {shown}" if shown else "what it saves through flk is kept until the end of this run"
    sizes = f", elastic from {job.elastic.min} to {job.elastic.max} pods" if job.elastic else ""
    sizes += f", {plural(job.spares, 'spare')}" if job.spares else ""
    note(f"{job.name}: {job.replicas} x {job.processes_per_pod} ranks on this machine{sizes}, {kept}")
    local = LocalRun(job, here)
    exit_code = local.run()
    name, record = str(job.name), local.shown.record
    if failure := local.shown.failure(name):
        print_error(failure)
        return exit_code
    end = local.shown.end()
    end = f" {_ENDS.get(exit_code, 'ended')} {end}" if end.startswith("after") else f": {end}"
    note(f"job {name}{end}" + (f"; {record.warning}" if record and record.warning else ""))
    return exit_code


def convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML with one PyTorchJob; - is stdin.")],
) -> None:
    """Print the job file of a job that trains as a PyTorchJob of any origin does: flk convert old.yaml > flk.yaml."""
    from flk.manifest import convert as conversion
    from flk.spec.file import source_name, text

    print(conversion.job_file(conversion.convert(text(file), source_name(file))), end="")


def init(
    script: Annotated[str, typer.Argument(metavar="[SCRIPT]", help="The training script.", show_default=False)] = "",
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Number of pods.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write flk.yaml with a comment for every field."""
    from flk.spec.job import validated
    from flk.spec.overlay import JOB_FILE
    from flk.spec.schema import template

    script = script or next((name for name in ("train.py", "main.py") if Path(name).is_file()), "train.py")
    validated({"command": [script]}, where={"command": "SCRIPT"})
    path, new = Path(JOB_FILE), Path(f".{JOB_FILE}.new")
    if (path.exists() or path.is_symlink()) and not force:
        raise UsageError(f"{JOB_FILE} exists already", hint="--force overwrites it")
    try:
        new.write_text(template(script, replicas), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise UsageError(f"cannot write {JOB_FILE}: {(error.strerror or str(error)).lower()}") from None
    note(f"wrote {JOB_FILE}")
    if not Path(script).exists():
        note(f"flk.yaml names {script}, which does not exist yet")
