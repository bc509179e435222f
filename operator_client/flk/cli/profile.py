"""`flk profile`: profile some steps of ranks of a running job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.logs import parse_ranks
from flk.cli.options import Context, JobName, Namespace, note, open_job, output_format, seconds
from flk.errors import ApiError, FlkError, UsageError
from flk_runtime.contract.quantities import plural

if TYPE_CHECKING:
    from flk.jobs.profiling import Profiled, RankPlace

SCHEMA: Final = "flk.dev/profile/v1"
_STEPS: Final = 1000  # that are profiled at most: a trace is held in the memory of the rank
_TIMEOUT: Final = "60s"


def profile(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    rank: Annotated[
        str, typer.Option("--rank", metavar="R,…", help="Only these ranks: 0,2 or 0-3; or all. At most 16 at once.")
    ] = "0",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=_STEPS, help="Steps to profile.")] = 10,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also record the history of CUDA memory, for pytorch.org/memory_viz.")
    ] = False,
    stacks: Annotated[
        str | None,
        typer.Option(
            "--stacks", metavar="DURATION", help="Record stacks with py-spy instead, also of ranks that hang."
        ),
    ] = None,
    timeout: Annotated[
        str, typer.Option("--step-timeout", metavar="DURATION", help="Give up after this time without a step.")
    ] = _TIMEOUT,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the files go.")] = Path(),
    output: Annotated[str, output_format("text", "json")] = "text",
) -> int | None:
    """Profile the next steps of ranks of a running job with torch's profiler, without a restart.

    The trace comes to this machine, for Perfetto (ui.perfetto.dev) or chrome://tracing, and a summary is printed. The
    training goes on while it is a little slower; results do not change. Needs the rights to get and create pods/exec.
    """
    if stacks is not None and memory:
        raise UsageError("--stacks and --memory exclude each other")
    ranks = None if rank == "all" else sorted(parse_ranks(rank))
    limit, record = seconds(timeout, "--step-timeout"), seconds(stacks, "--stacks")
    if not limit or record == 0:
        raise UsageError(f"{'--stacks' if limit else '--step-timeout'}: must be longer than 0s")
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
    request: dict[str, Any] = (
        {"arguments": {"steps": steps, "timeout": limit, "memory": memory}} if record is None else {"seconds": record}
    )
    what = f"the next {plural(steps, 'step')}" if record is None else f"{record} s of stacks"
    note(f"profiling {what} of rank{'s' * (len(found) > 1)} {', '.join(str(place.rank) for place in found)}")

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
    from flk.terminal import print_error

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
    from flk.cli.profile_text import profile_text
    from flk.jobs.profiling import TraceSummary, summary_of

    items: list[dict[str, Any]] = []
    for number, each in enumerate(done):
        summary: TraceSummary | None = None
        if "steps" in each.answer:
            summary = summary_of(each.files[0])
            if summary is None:
                raise ApiError(f"the trace of rank {each.rank} has no whole step", hint=f"it is in {each.files[0]}")
        if output == "json":
            own = {key: value for key, value in each.answer.items() if key != "files"}
            files = [str(path) for path in each.files]
            measured = {} if summary is None else {"summary": asdict(summary)}
            items.append({"rank": each.rank, "pod": each.pod, "files": files, **own, **measured})
            continue
        if summary is not None:
            sys.stdout.write("\n" * bool(number) + profile_text(each.rank, each.pod, each.answer, summary))
            sys.stdout.flush()
        for path in each.files:
            note(f"{path}: {_use(path)}")
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "job": name, "ranks": items}, indent=2))


def _use(path: Path) -> str:
    uses = {
        ".gz": "open it in ui.perfetto.dev or chrome://tracing",
        ".pickle": "open it in pytorch.org/memory_viz",
        ".svg": "a flame graph, for a browser",
    }
    return uses.get(path.suffix, "")
