"""`flk stacks`: show what every rank of a running job is doing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.options import Context, JobName, Namespace, check_text_or_json, open_job
from flk.errors import ApiError, UsageError

if TYPE_CHECKING:
    from flk.kube import Object
    from flk.observe.client import JobClient

SCHEMA: Final = "flk.dev/stacks/v1"
_TIMEOUT: Final = 45.0  # seconds; the leader waits 12 for the stacks of all pods
_PODS: Final = 32  # of a job without flk's launcher that are looked at
# For a container without flk's launcher. It knows no ranks: they are in the environment of processes, as secrets are.
_PY_SPY: Final = """
command -v py-spy >/dev/null || exit 127
for folder in /proc/[0-9]*; do
  case $(cat $folder/comm 2>/dev/null) in python*|pt_main*) ;; *) continue ;; esac
  echo "process ${folder#/proc/}"; py-spy dump --pid ${folder#/proc/} 2>&1 | tail -n +4
done
"""
_PROCESS: Final = re.compile(r"^process (\d+)\n", re.MULTILINE)


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

    from flk.observe.pods import launcher_command

    client, job = open_job(job, context, namespace)
    found = client.get_job(job)
    running = [pod for pod in client.pods_of(found) if (pod.get("status") or {}).get("phase") == "Running"]
    if not running:
        raise ApiError(f"no pod of {job} runs", hint=f"{client.commands.flk('why', job)} says why")
    launchers = [pod for pod in running if launcher_command(pod)]
    if rank is not None and not launchers:
        raise UsageError(f"--rank: {job} does not run with flk's launcher, so its processes have no known ranks")
    report = _of_launcher(client, launchers) if launchers else _of_py_spy(client, running)
    if rank is not None:
        report["groups"] = [group for group in report["groups"] if rank in group["ranks"]]
        if not report["groups"]:
            raise ApiError(
                f"no stack of rank {rank}", hint=f"{client.commands.flk('stacks', job)} shows all that there are"
            )
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "job": job, **report}, indent=2))
    else:
        sys.stdout.write(_text(report))


def _of_launcher(client: JobClient, pods: Sequence[Object]) -> dict[str, Any]:
    """Ask the launcher of one pod, which asks the others."""
    from flk.observe.pods import launcher_command

    pod = min(pods, key=lambda each: each["metadata"]["name"])
    done = client.execute(pod, [*launcher_command(pod), "stacks"], _TIMEOUT)
    report: dict[str, Any] = done.answer(f"the launcher in {pod['metadata']['name']}")
    return report


def _of_py_spy(client: JobClient, pods: Sequence[Object]) -> dict[str, Any]:
    """Ask py-spy in each pod for the stacks of all Python processes."""
    by_stack: dict[str, list[str]] = {}
    without: list[str] = []
    for pod in pods[:_PODS]:
        name = pod["metadata"]["name"]
        done = client.execute(pod, ["sh", "-c", _PY_SPY], _TIMEOUT)
        if done.code in (126, 127):
            without.append(name)
        found = _PROCESS.split(done.stdout.decode(errors="replace"))[1:]
        for number, stack in zip(found[::2], found[1::2], strict=True):
            by_stack.setdefault(stack.rstrip(), []).append(f"process {number} in {name}")
    if not by_stack:
        raise ApiError(
            f"{without[0] if without else pods[0]['metadata']['name']} has neither flk's launcher nor py-spy",
            hint="install py-spy in the image, or start the script with python -m flk_runtime",
        )
    groups = [
        {"ranks": [], "heading": ", ".join(processes), "lines": stack.splitlines()}
        for stack, processes in sorted(by_stack.items(), key=lambda item: (len(item[1]), item[1]))
    ]
    return {"cause": "", "ranks": [], "groups": groups, "left": [], "silent": without}


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
