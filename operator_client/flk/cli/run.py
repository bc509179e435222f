"""`flk run`: run the job on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import LoadedJob, note, takes_job
from flk.errors import JobFailedError
from flk.terminal import print_error
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.ranges import plural

if TYPE_CHECKING:
    from flk.local.shown import Shown
    from flk_runtime.contract.record import JobRecord

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
        return LocalRun(as_check(job), here).run()
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
    record, name = local.shown.record, str(job.name)
    if record and record.failure:
        _print_failure(name, local.shown, record)
        return exit_code
    end = local.shown.end()
    if end.startswith("after"):
        end = f"{_ENDS.get(exit_code, 'ended')} {end}"
    note(f"{name}: {end}" + (f"; {record.warning}" if record and record.warning else ""))
    return exit_code


def _print_failure(name: str, shown: Shown, record: JobRecord) -> None:
    reason = f"; {record.no_retry_reason}" if record.no_retry_reason else ""
    failure = record.failure.summary if record.failure else ""
    hint = f"the same command goes on at step {record.stored}" if record.stored else ""
    print_error(JobFailedError(f"job {name} failed {shown.took}: {failure}{reason}", hint=hint))
