"""`flk profile` and `flk stacks`: what ranks of a running job do, for some steps or at this moment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.logs import parse_ranks
from flk.cli.options import Context, JobName, Namespace, note, open_job, output_format
from flk.errors import FlkError, UsageError
from flk.user.terminal import print_error, printable_lines
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.jobs.profiling import RankPlace

_STEPS: Final = 1000  # that are profiled at most: a trace is held in the memory of the rank
_TIMEOUT: Final = 60  # seconds without a step after which a rank gives up


def profile(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    rank: Annotated[
        str, typer.Option("--rank", metavar="R,…", help="Only these ranks: 0,2 or 0-3; or all. At most 16 at once.")
    ] = "0",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=_STEPS, help="Steps to profile.")] = 10,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the files go.")] = Path(),
) -> int | None:
    """Profile the next steps of ranks of a running job with torch's profiler, without a restart.

    The trace comes to this machine, for Perfetto (ui.perfetto.dev) or TensorBoard. The training goes on while it is a
    little slower; results do not change. Needs the rights to get and create pods/exec.
    """
    ranks = None if rank == "all" else sorted(parse_ranks(rank))
    if not to.is_dir():
        raise UsageError(f"--to: there is no folder {to}")
    from flk.jobs.profiling import places
    from flk.jobs.profiling import profile as profile_rank
    from flk.observe.pods import launcher_command

    client, name = open_job(job, context, namespace)
    found = places(client, name, ranks)
    pythons = {place.rank: launcher_command(place.pod) for place in found}
    if not all(pythons.values()):
        raise UsageError(
            f"{name} does not run with flk's launcher, which knows the ranks",
            hint="submit the script with flk",
        )
    request = {"arguments": {"steps": steps, "timeout": _TIMEOUT}}
    chosen = f"rank{'s' * (len(found) > 1)} {', '.join(str(place.rank) for place in found)}"
    note(f"profiling the next {plural(steps, 'step')} of {chosen}")

    def one(place: RankPlace) -> list[Path]:
        return profile_rank(client, name, place, pythons[place.rank][0], request, to, note)

    try:
        return _all(found, one)
    except KeyboardInterrupt as interrupt:
        left = "ranks that were asked finish their profiles, which stay in the pods, and the job goes on"
        interrupt.args = (left,)
        raise


def _all(found: list[RankPlace], one: Callable[[RankPlace], list[Path]]) -> int | None:
    """Profile all ranks at once and say where the files are. Of several, errors are printed and the others kept."""
    from flk.observe.pool import ReadPool

    code = 0
    with ReadPool(len(found)) as pool:
        for future in [pool.submit(one, place) for place in found]:
            try:
                files = future.result()
            except FlkError as error:
                if len(found) == 1:
                    raise
                print_error(error)
                code = code or int(error.code)
                continue
            for path in files:
                print(f"{path}: open it in ui.perfetto.dev, or with tensorboard --logdir", flush=True)
    return code or None


STACKS_SCHEMA: Final = "flk.dev/stacks/v1"


def stacks(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Show only this rank.")] = None,
    output: Annotated[str, output_format("text", "json")] = "text",
) -> None:
    """Show the stacks of all ranks of a running job: equal ones once, the odd ones first. The job runs on.

    The first line says which rank the others wait for. Needs the rights to get and create pods/exec, and a job
    with flk's launcher.
    """
    from flk.jobs.telemetry import read_stacks

    client, job = open_job(job, context, namespace)
    report = read_stacks(client, job, rank)
    if output == "json":
        print(json.dumps({"schema": STACKS_SCHEMA, "job": job, **report}, indent=2))
    else:
        sys.stdout.write(_stacks_text(report))


def _stacks_text(report: dict[str, Any]) -> str:
    lines = [report["cause"], ""] if report["cause"] else []
    for group in report["groups"]:
        lines += [group["heading"], *group["lines"], ""]
    if not report["groups"]:
        lines.append("no rank runs now")
    if report["silent"]:
        lines.append(f"no stacks from {', '.join(report['silent'])}")
    return printable_lines(lines)
