"""`flk run`: run the job on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flk.cli.options import LoadedJob, note, takes_job
from flk.terminal import print_error
from flk_runtime.contract.failure import ExitCode
from flk_runtime.contract.quantities import plural

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
