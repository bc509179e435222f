"""`flk run`: run the job on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flk.cli.options import LoadedJob, note, takes_job
from flk.errors import JobFailedError, UsageError
from flk.terminal import print_error
from flk_runtime.contract.ranges import plural


@partial(takes_job, here=True)
def run(
    loaded: LoadedJob,
    check: Annotated[
        bool, typer.Option("--check", help="Start the ranks, compare their reports, do one all-reduce and exit.")
    ] = False,
    pod_folders: Annotated[
        bool,
        typer.Option(
            "--pod-folders",
            help="Give each pod a folder of its own with the files that would travel, in .flk/pods/NAME.",
        ),
    ] = False,
) -> int:
    """Train on this machine, with the environment of the pods: one launcher for each replica.

    The exit code is the job's. Ctrl-C ends all processes, a second Ctrl-C kills them.
    """
    from flk.local.places import checkpoint_place, pods_folder
    from flk.local.run import LocalRun, as_check
    from flk.manifest.bundle import make_bundle, saves_of

    job, here = loaded.job.named(), Path.cwd()
    if check:
        return LocalRun(as_check(job), here).run()
    if job.volumes:
        note(f"volumes are not mounted on this machine: {', '.join(job.volumes)}")
    code, folders = None, pods_folder(job, here)
    if pod_folders:
        if folders.exists():
            raise UsageError(
                f"{folders.relative_to(here)} has what another run of this name wrote",
                hint="move it away, or use another --name",
            )
        code = make_bundle(job, loaded.root).code
        if code is None:
            raise UsageError("--pod-folders needs the files that would travel, and --no-ship says that none do")
    elif job.replicas > 1 and (saves := saves_of(job, loaded.root)):
        note(
            f"what {saves} writes is in one folder for all pods here; in a cluster each pod has its own, which goes "
            "with the pod: --pod-folders does so here"
        )
    if code is None:
        job = LoadedJob(job, loaded.root).started_in(here)
    place = checkpoint_place(job, here)
    shown = place.relative_to(here) if isinstance(place, Path) else place
    kept = f"checkpoints in {shown}" if shown else "what it saves through flk is kept until the end of this run"
    sizes = f", elastic from {job.elastic.min} to {job.elastic.max} pods" if job.elastic else ""
    sizes += f", {plural(job.spares, 'spare')}" if job.spares else ""
    note(f"{job.name}: {job.replicas} x {job.processes_per_pod} ranks on this machine{sizes}, {kept}")
    local = LocalRun(job, here, code)
    exit_code = local.run()
    if pod_folders:
        note(f"what pod N wrote beside the script is in {folders.relative_to(here)}/N")
    if local.record and local.record.failure:
        print_error(JobFailedError(f"job {job.name} failed: {local.record.failure.summary}"))
    return exit_code
