"""`flk status`: show the state of a job, its attempts and its pods, and why it ended."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flk.cli.options import Context, JobName, Namespace
from flk.errors import UsageError

if TYPE_CHECKING:
    from flk.jobs.state import State

_SHOWN: Final = 32  # pods in the text format


def status(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FORMAT", help="Output format: text, wide (all pods), json, yaml."),
    ] = "text",
) -> None:
    """Show the status of a job: its phase, its attempts and why each ended, its pods and why they do not run.

    Exits with 0 whatever the state of the job is; `flk wait --timeout 0` exits with the job's exit code.
    """
    if output not in ("text", "wide", "json", "yaml"):
        raise UsageError(f"--output: must be text, wide, json or yaml (is {output!r})")
    from flk.jobs.client import JobClient
    from flk.jobs.wait import get_state

    client = JobClient.connect(context, namespace)
    state = get_state(client, job)
    if output == "json":
        print(json.dumps(state.to_dict(), indent=2))
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(json.loads(json.dumps(state.to_dict())), sort_keys=False, allow_unicode=True), end="")
    else:
        sys.stdout.write(_text(state, client.now(), all_pods=output == "wide"))


def _text(state: State, now: float, *, all_pods: bool) -> str:
    from flk.cli.table import table
    from flk.terminal import printable
    from flk.units import plural, short_duration

    pods, ranks = plural(state.replicas, "pod"), plural(state.processes, "rank")
    shape = f"{pods} x {ranks}" if state.processes > 1 else plural(state.replicas, "rank")
    lines = [
        f"{state.name}   {state.phase}   in namespace {state.namespace}",
        f"{shape}, created {short_duration(now - state.created)} ago{f' by {state.owner}' if state.owner else ''}, "
        f"image {state.image}",
    ]
    if state.message:
        lines.append(f"{state.reason}: {state.message}" if state.reason and not state.failure else state.message)
    if state.verdict:
        lines.append(state.verdict)
    if state.attempts:
        lines += ["", f"attempt {state.attempt}{_used(state)}:"]
        rows = [
            [
                str(attempt.number),
                attempt.outcome,
                short_duration((attempt.ended or now) - attempt.started),
                attempt.cause,
            ]
            for attempt in state.attempts
        ]
        lines += table(["ATTEMPT", "OUTCOME", "TIME", "CAUSE"], rows)
    shown = [
        [pod.name, _ranks(pod.ranks), pod.phase, str(pod.restarts), pod.node, _why(pod.reason, pod.message)]
        for pod in state.pods
        if all_pods or len(state.pods) <= _SHOWN or pod.phase not in ("Running", "Succeeded")
    ][: None if all_pods else _SHOWN]
    lines += ["", *table(["POD", "RANKS", "PHASE", "RESTARTS", "NODE", "REASON"], shown)]
    left = len(state.pods) - len(shown)
    if left:
        lines.append(f"and {left} more pods (-o wide shows all)")
    if state.slow:
        lines += ["", *(slow.summary for slow in state.slow)]
    if state.failure and state.failure.details:
        lines += ["", *(f"  {line}" for line in state.failure.details.splitlines())]
    return "".join(printable(line) + "\n" for line in lines)


def _used(state: State) -> str:
    """Return what the job has used of its restarts and disruptions."""
    if state.max_restarts is None:
        return ""
    return (
        f", {state.restarts} of {state.max_restarts} restarts and "
        f"{state.disruptions} of {state.max_disruptions} disruptions used"
    )


def _ranks(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _why(reason: str, message: str) -> str:
    last = message.strip().splitlines()[-1] if message.strip() else ""
    text = f"{reason}: {last}" if reason and last else reason or last
    return text if len(text) <= 160 else text[:157] + "…"
