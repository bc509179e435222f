"""`flk bench`: measure the strategies with a training script, in the cluster or on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, LoadedJob, Namespace, note, output_format, seconds, takes_job
from flk.errors import FlkError
from flk.spec.units import bytes_text, time_text
from flk.user.terminal import one_line, print_error
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.local.bench import BenchResult
    from flk.spec.job import Job

_CASE = 300  # seconds that a strategy may take by default


@takes_job
def bench(
    loaded: LoadedJob,
    context: Context = None,
    namespace: Namespace = None,
    local: Annotated[bool, typer.Option("--local", help="Measure on this machine, as flk run trains.")] = False,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies", metavar="NAME,…", help="Strategies to measure. Default: all that differ on these nodes."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps to measure, after 3 that warm up.")
    ] = 10,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--strategy-timeout",
            metavar="DURATION",
            help=f"Time that each strategy may take each time. Default: {_CASE}s.",
        ),
    ] = None,
    output: Annotated[str, output_format("text", "json")] = "text",
) -> int:
    """Run a script for a few steps under each strategy, twice in turn in one job, and compare them.

    The job has the pods of the training job and is deleted at the end. Shows the shorter time of a step, MFU and peak
    memory. Results are kept on this machine: strategy auto uses them for the same model and hardware.
    """
    limit = seconds(timeout, "--strategy-timeout") or _CASE
    from flk.local.bench import bench_job

    here = Path.cwd()
    job, root = (loaded.started_in(here), here) if local else (loaded.job, loaded.root)
    names = [*filter(None, map(str.strip, (strategies or "").split(",")))]
    job = bench_job(job, names, root=root, steps=steps, timeout=limit)
    code, result = _local(job, here) if local else _in_cluster(job, loaded.root, context, namespace)
    if result is None:
        note("there is no result: the lines above say why")
        return code or int(ExitCode.ERROR)
    try:
        if result.keep() is None:
            note("the result is not kept: without a plan of the script it cannot be told for which model it is")
    except OSError as error:
        note(f"the result is not kept: {error}")
    print(json.dumps(result.data, indent=2) if output == "json" else "\n".join(_text(result)))
    return code if result.fastest or code else int(ExitCode.TRAINING)


def _local(job: Job, folder: Path) -> tuple[int, BenchResult | None]:
    from flk.local.run import LocalRun

    note(f"{job.name}: {job.replicas} x {job.processes_per_pod} ranks on this machine")
    watched, local = _Watched(), LocalRun(job, folder)
    with contextlib.redirect_stdout(watched):
        code = local.run()
    if failure := local.shown.failure(str(job.name)):
        print_error(failure)
    return code, watched.result


def _in_cluster(job: Job, root: Path, context: str | None, namespace: str | None) -> tuple[int, BenchResult | None]:
    from flk.jobs import logs, wait
    from flk.jobs.state import Phase
    from flk.jobs.submission import prepare
    from flk.observe.client import JobClient

    client = JobClient.connect(context, namespace)
    handle = prepare(job, root, client).create()
    note(f"created job {handle.name} in namespace {handle.namespace}; it is deleted at the end")
    watched = _Watched()
    try:
        started = wait.wait_for(client, handle.name, uid=handle.uid, goal=Phase.RUNNING)
        if started.outcome is not wait.Outcome.REACHED:
            wait.raise_for_state(started.state, client, started.outcome)
        for line in logs.follow(client, handle.name, logs.LogOptions()):
            watched.write(f"{line.text}\n")
            if watched.result:
                return 0, watched.result
        handle.wait()
    finally:
        try:
            handle.delete()
        except FlkError as error:
            note(f"job {handle.name} could not be deleted: {error}")
    return 0, watched.result


class _Watched(io.TextIOBase):
    """A text stream that passes lines on to stderr and keeps the result among them."""

    def __init__(self) -> None:
        self.result: BenchResult | None = None

    def write(self, text: str) -> int:
        """Take whole lines."""
        from flk.local.bench import BenchResult

        for line in text.splitlines():
            found = BenchResult.find(line)
            if found:
                self.result = found
            else:
                print(line, file=sys.stderr)
        return len(text)


def _text(result: BenchResult) -> Iterator[str]:
    from flk.cli.output import table

    data = result.data
    rows = [
        _row(name, each)
        for name, each in sorted(data["strategies"].items(), key=lambda item: item[1].get("seconds", float("inf")))
    ]
    yield from table(["STRATEGY", "STEP", "MFU", "MEMORY"], rows)
    yield ""
    yield from (f"warning: {one_line(text)}" for text in data["warnings"])
    if result.fastest:
        yield f"fastest: --strategy {result.fastest}"


def _row(name: str, measured: dict[str, object]) -> list[str]:
    if "error" in measured:
        return [name, f"failed: {one_line(str(measured['error']))[:80]}", "", ""]
    mfu, memory = measured["mfu"], measured["memory"]
    assert isinstance(memory, list)  # noqa: S101
    return [
        name,
        time_text(float(str(measured["seconds"]))),
        "" if mfu is None else f"{float(str(mfu)):.1%}",
        bytes_text(max(memory)),
    ]
