"""`flk list`: list the jobs of a namespace, or of all namespaces."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Namespace, note, output_format
from flk.errors import UsageError

if TYPE_CHECKING:
    from flk.jobs.state import State


def list_(
    context: Context = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", metavar="LABELS", help="List jobs with these labels: team=nlp.")
    ] = None,
    output: Annotated[
        str,
        output_format("text", "wide", "json", "name", explained="text, wide (the cause too), json, name"),
    ] = "text",
) -> None:
    """List jobs, the newest last, with the phase of each and the code of what keeps it from running or ended it.

    `watch flk list` shows them live.
    """
    if all_namespaces and namespace:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    from flk.jobs.listing import list_observed, with_records
    from flk.observe.client import JobClient

    client = JobClient.connect(context, namespace)
    every = list_observed(client, all_namespaces=all_namespaces, selector=selector)
    states = [item.state for item in with_records(client, every)]
    if states or output in ("json", "name"):
        sys.stdout.write(_text(states, output, client.now(), all_namespaces=all_namespaces))
    elif not all_namespaces and client.lacks_namespace():
        note(f"there is no namespace {client.namespace} in this cluster")
    else:
        chosen = " that match" if selector else ""
        note(f"there are no jobs{chosen}" + ("" if all_namespaces else f" in namespace {client.namespace}"))
    sys.stdout.flush()


def _text(states: list[State], output: str, now: float, *, all_namespaces: bool) -> str:
    """Return the list in a format. ``wide`` has the sentences of the causes."""
    from flk.cli.output import items_text, phase_style, table
    from flk.observe.resources import qualified
    from flk.spec.units import short_duration
    from flk.user.terminal import printable, styled

    if output == "json":
        return items_text([state.to_dict() for state in states]) + "\n"
    if output == "name":
        return "".join(f"{qualified(state.kind, state.name)}\n" for state in states)
    header = ["NAMESPACE", "NAME", "PHASE", "PODS", "AGE", "OWNER", "REASON"]
    rows = [
        [
            state.namespace,
            state.name,
            str(state.phase),
            f"{state.ready}/{state.replicas}",
            short_duration(now - state.created),
            state.owner,
            f"{state.reason}: {state.message}" if output == "wide" and state.message else state.reason,
        ]
        for state in states
    ]
    head, *lines = table(header, rows, without=() if all_namespaces else ("NAMESPACE",))
    shown = [printable(line) for line in lines]
    for number, phase in enumerate(str(state.phase) for state in states):
        shown[number] = shown[number].replace(phase, styled(phase, phase_style(phase), sys.stdout), 1)
    return "".join(f"{line}\n" for line in (head, *shown))
