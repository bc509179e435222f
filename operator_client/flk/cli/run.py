"""`flk run`: run the job on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flk.cli.options import LoadedJob, note, takes_job


@takes_job
def run(
    loaded: LoadedJob,
    check: Annotated[
        bool, typer.Option("--check", help="Start the ranks, compare their reports, do one all-reduce and exit.")
    ] = False,
) -> int:
    """Train on this machine, with the environment of the pods: one launcher for each replica.

    The exit code is that of the job. Ctrl-C ends all processes, a second Ctrl-C kills them.
    """
    from flk.local import LocalRun, as_check, checkpoint_folder

    job, here = loaded.job.named(), Path.cwd()
    if check:
        return LocalRun(as_check(job), here).run()
    if job.volumes:
        note(f"volumes are not mounted on this machine: {', '.join(job.volumes)}")
    if job.command[0] != "-m" and loaded.root != here:
        job = job.changed(command=[str(loaded.root / job.command[0]), *job.command[1:]])
    folder = checkpoint_folder(job, here)
    kept = f"checkpoints in {folder.relative_to(here)}" if folder else "checkpoints only until the end of this run"
    note(f"{job.name}: {job.replicas} x {job.processes_per_pod} ranks on this machine, {kept}")
    local = LocalRun(job, here)
    code = local.run()
    if local.record and local.record.failure:
        note(f"failed: {local.record.failure.summary}")
    return code
