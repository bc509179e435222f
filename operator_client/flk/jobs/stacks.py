"""The stacks of a running job: from its launchers, or from py-spy in the pods of a job without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from flk.errors import ApiError, UsageError
from flk.kube import Object
from flk.observe.client import JobClient
from flk.observe.pods import launcher_command, phase_of

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


def read_stacks(client: JobClient, job: str, rank: int | None = None) -> dict[str, Any]:
    """Return the stacks of all ranks of a running job, or of one, as `flk stacks -o json` prints them.

    ``groups`` has equal stacks once, the odd ones first: their ``ranks``, a ``heading`` and ``lines``. ``cause`` says
    which rank the others wait for. Raises ApiError if no pod runs, if the rank has no stack or if nothing in the pods
    can show any, and UsageError for the rank of a job without flk's launcher.
    """
    found = client.get_job(job)
    running = [pod for pod in client.pods_of(found) if phase_of(pod) == "Running"]
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
    return report


def _of_launcher(client: JobClient, pods: Sequence[Object]) -> dict[str, Any]:
    """Ask the launcher of one pod, which asks the others."""
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
