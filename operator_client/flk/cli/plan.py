"""`flk plan`: predict memory, communication and speed of each strategy for a training script."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import LoadedJob, note, output_format, takes_job
from flk.spec.units import bytes_text, number_text, time_text

if TYPE_CHECKING:
    from flk.local.plan import Plan, Row

_GPU_TYPE = "h100"  # of a job that names none
_LESS_MEMORY = {"A100": "a100-40gb", "V100": "v100-16gb"}  # by the type of a job, of which some nodes have this one


@partial(takes_job, here=True)
def plan(
    loaded: LoadedJob,
    gpu_type: Annotated[
        str | None,
        typer.Option(
            "--gpu-type", metavar="NAME", help="Type of the GPUs: a100-40gb, b200, … Default: the job's, else h100."
        ),
    ] = None,
    output: Annotated[str, output_format("text", "json")] = "text",
) -> None:
    """Predict memory, communication, step time and MFU of each strategy, and recommend one.

    The script runs on this machine up to its first step, with a model that has shapes and no data: it needs neither a
    GPU nor memory for the model. Nothing is sent to a cluster.
    """
    from flk.local.plan import make_plan

    here = Path.cwd()
    job = loaded.started_in(here).named()
    if job.setup:
        note("the setup command does not run for a plan")
    smaller = None if gpu_type else _LESS_MEMORY.get(job.resources.gpu_type or "")
    if smaller:
        note(
            f"some nodes with {job.resources.gpu_type} have GPUs with less memory: --gpu-type {smaller} plans for them"
        )
    found = make_plan(job, here, gpu_type or job.resources.gpu_type or _GPU_TYPE)
    if output == "json":
        print(json.dumps(found.output, indent=2))
    else:
        print("\n".join(_text(found)))


def _text(plan: Plan) -> list[str]:
    from flk.cli.output import table
    from flk_runtime.contract.quantities import plural

    best = plan.best
    lines = [
        f"{number_text(plan.parameters)} parameters on {plural(plan.world_size, 'rank')}, "
        f"{plan.gpu} with {bytes_text(plan.memory)} of memory each",
        "",
    ]
    header = ["STRATEGY", "MEMORY", "STATE", "ACTIVATIONS", "SENT", "STEP", "MFU", "BATCH"]
    lines += table(header, [*map(_cells, plan.rows)])
    lines += ["", _recommendation(plan, best), ""]
    lines += [f"warning: {text}" for text in plan.warnings]
    return lines + [f"assumes: {text}" for text in plan.assumptions]


def _cells(row: Row) -> list[str]:
    return [
        row.strategy,
        bytes_text(row.total) if row.fits else f"{bytes_text(row.total)} does not fit",
        bytes_text(row.parameters + row.gradients + row.optimizer),
        bytes_text(row.activations),
        bytes_text(row.wire_inside + row.wire_between),
        time_text(row.step_seconds) + ("" if row.modelled else " ?"),
        "" if row.mfu is None else f"{row.mfu:.1%}",
        f"{row.largest_batch:.3g}x" if row.largest_batch < 1000 else ">1000x",
    ]


def _recommendation(plan: Plan, best: Row | None) -> str:
    least = plan.rows[0]
    if least.fits and best is None:
        return (
            "no recommendation, since the times marked with ? leave something out (see the warnings): `flk bench` "
            f"measures them, and {least.strategy} needs least memory"
        )
    if best is None:
        return (
            f"no strategy fits: {least.strategy} needs least, {bytes_text(least.total)} of {bytes_text(plan.memory)}; "
            f"use {', '.join(['a smaller micro-batch', *plan.savings, 'more GPUs'])}, or GPUs with more memory"
        )
    slower = [row for row in plan.rows if row.fits and row is not best]
    reason = "the only strategy that fits"
    if slower:
        by = slower[0].step_seconds / best.step_seconds - 1
        other = slower[0].strategy
        reason = f"the fastest that fits: {other} takes {by:.0%} longer"
        if by < 0.01:
            reason = f"the fastest that fits, as fast as {other}"
    return f"recommended: --strategy {best.strategy} ({reason})"
