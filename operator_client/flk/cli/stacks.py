"""`flk stacks`: show what every rank of a running job is doing."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer

from flk.cli.options import Context, JobName, Namespace, check_text_or_json, open_job

SCHEMA: Final = "flk.dev/stacks/v1"


def stacks(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Show only this rank.")] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FORMAT", help="Output format: text, json.")
    ] = "text",
) -> None:
    """Show the stacks of all ranks of a running job: equal ones once, the odd ones first. The job runs on.

    The first line says which rank the others wait for. Needs the right to create pods/exec. In jobs without flk's
    launcher it shows the stacks of all Python processes, if the image has py-spy.
    """
    check_text_or_json(output)
    from flk.jobs.stacks import read_stacks

    client, job = open_job(job, context, namespace)
    report = read_stacks(client, job, rank)
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "job": job, **report}, indent=2))
    else:
        sys.stdout.write(_text(report))


def _text(report: dict[str, Any]) -> str:
    from flk.terminal import printable

    lines = [report["cause"], ""] if report["cause"] else []
    for group in report["groups"]:
        lines += [group["heading"], *group["lines"], ""]
    if not report["groups"]:
        lines.append("no rank runs now")
    if report["left"]:
        lines.append(f"the stacks of {len(report['left'])} more ranks are left out")
    if report["silent"]:
        lines.append(f"no stacks from {', '.join(report['silent'])}")
    return "".join(printable(line) + "\n" for line in lines)
