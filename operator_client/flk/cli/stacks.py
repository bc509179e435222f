"""`flk stacks`: show what every rank of a running job is doing."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer

from flk.cli.options import Context, JobName, Namespace, open_job, output_format

SCHEMA: Final = "flk.dev/stacks/v1"


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
        print(json.dumps({"schema": SCHEMA, "job": job, **report}, indent=2))
    else:
        sys.stdout.write(_text(report))


def _text(report: dict[str, Any]) -> str:
    from flk.terminal import printable_lines

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
