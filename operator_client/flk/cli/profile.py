"""`flk profile` and `flk stacks`: what ranks of a running job do, for some steps or at this moment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.logs import parse_ranks
from flk.cli.options import Context, JobName, Namespace, note, open_job, output_format
from flk.cli.output import cut, table
from flk.errors import ApiError, FlkError, UsageError
from flk.terminal import print_error, printable_lines
from flk.units import time_text
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.jobs.profiling import Operator, Profiled, RankPlace, TraceSummary

SCHEMA: Final = "flk.dev/profile/v1"
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
    output: Annotated[str, output_format("text", "json")] = "text",
) -> int | None:
    """Profile the next steps of ranks of a running job with torch's profiler, without a restart.

    The trace comes to this machine, for Perfetto (ui.perfetto.dev) or chrome://tracing, and a summary is printed. The
    training goes on while it is a little slower; results do not change. Needs the rights to get and create pods/exec.
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
            hint="start the script with python -m flk_runtime",
        )
    request = {"arguments": {"steps": steps, "timeout": _TIMEOUT}}
    chosen = f"rank{'s' * (len(found) > 1)} {', '.join(str(place.rank) for place in found)}"
    note(f"profiling the next {plural(steps, 'step')} of {chosen}")

    def one(place: RankPlace) -> Profiled:
        return profile_rank(client, name, place, pythons[place.rank][0], request, to, note)

    try:
        return _all(name, found, one, output)
    except KeyboardInterrupt as interrupt:
        left = "ranks that were asked finish their profiles, which stay in the pods, and the job goes on"
        interrupt.args = (left,)
        raise


def _all(name: str, found: list[RankPlace], one: Callable[[RankPlace], Profiled], output: str) -> int | None:
    """Profile all ranks at once and print what was found. Of several, errors are printed and the others kept."""
    from flk.observe.pool import ReadPool

    done: list[Profiled] = []
    code = 0
    with ReadPool(len(found)) as pool:
        for future in [pool.submit(one, place) for place in found]:
            try:
                done.append(future.result())
            except FlkError as error:
                if len(found) == 1:
                    raise
                print_error(error)
                code = code or int(error.code)
    _print(name, done, output)
    return code or None


def _print(name: str, done: list[Profiled], output: str) -> None:
    from flk.jobs.profiling import summary_of

    items: list[dict[str, Any]] = []
    for number, each in enumerate(done):
        summary = summary_of(each.files[0])
        if summary is None:
            raise ApiError(f"the trace of rank {each.rank} has no whole step", hint=f"it is in {each.files[0]}")
        if output == "json":
            own = {key: value for key, value in each.answer.items() if key != "files"}
            files = [str(path) for path in each.files]
            items.append({"rank": each.rank, "pod": each.pod, "files": files, **own, "summary": asdict(summary)})
            continue
        sys.stdout.write("\n" * bool(number) + profile_text(each.rank, each.pod, each.answer, summary))
        sys.stdout.flush()
        for path in each.files:
            note(f"{path}: {_use(path)}")
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "job": name, "ranks": items}, indent=2))


def _use(path: Path) -> str:
    uses = {
        ".gz": "open it in ui.perfetto.dev or chrome://tracing",
    }
    return uses.get(path.suffix, "")


_OPERATORS: Final = 10  # of the CPU, and of the GPU, that are shown
_NAME: Final = 60  # characters of an operator's name


def profile_text(rank: int, pod: str, answer: Mapping[str, Any], summary: TraceSummary) -> str:
    """Return the summary of one rank. ``answer`` comes from `flk_runtime.profiling.rank`."""
    mean = summary.seconds / summary.steps
    last = answer["first_step"] + summary.steps - 1
    lines = [
        f"rank {rank} in {pod}: {plural(summary.steps, 'step')} ({answer['first_step']} to {last}), "
        f"{time_text(mean)} a step, the longest {time_text(summary.longest)}",
        "  " + ", ".join(_shares(summary)),
        f"  {_overhead(answer, mean)}",
    ]
    for what, operators in (("CPU", summary.cpu), ("GPU", summary.gpu)):
        if operators:
            lines += ["", *_operators(what, operators, summary.steps)]
    return printable_lines(lines)


def _shares(summary: TraceSummary) -> list[str]:
    parts = [
        f"{summary.communication:.0%} communication",
        f"{summary.data_wait:.0%} waiting for data",
        f"{summary.outside:.0%} outside of operators",
    ]
    return [*parts, f"GPU {summary.gpu_busy:.0%} busy"] if summary.gpu_busy is not None else parts


def _overhead(answer: Mapping[str, Any], mean: float) -> str:
    """Return what the profiler cost: longer steps, and the time in which it held up the training."""
    before = answer["step_seconds_before"]
    share = mean / before - 1 if before else 0.0
    step = f"{share:+.0%} a step against" if share > 0 else "steps are no longer than the"
    longer = f"{step} {time_text(before)} before, " if before else ""
    return f"overhead of the profiler: {longer}{time_text(answer['pause_seconds'])} to begin and end"


def _operators(what: str, operators: Sequence[Operator], steps: int) -> list[str]:
    rows = [
        [cut(each.name, _NAME), f"{each.calls / steps:.4g}", time_text(each.seconds / steps), f"{each.share:.1%}"]
        for each in operators[:_OPERATORS]
    ]
    found = table([f"{what} OPERATOR", "CALLS/STEP", "SELF TIME/STEP", "SHARE"], rows)
    left = len(operators) - _OPERATORS
    return [*found, f"and {left} more"] if left > 0 else found


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
    if report["left"]:
        lines.append(f"the stacks of {len(report['left'])} more ranks are left out")
    if report["silent"]:
        lines.append(f"no stacks from {', '.join(report['silent'])}")
    return printable_lines(lines)
