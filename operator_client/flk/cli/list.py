"""`flk list`: list the jobs of a namespace, or of all namespaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flk.cli.options import Context, Namespace, note
from flk.errors import UsageError

if TYPE_CHECKING:
    from flk.jobs.state import State


_KEYS: Final[dict[str, Callable[[State], Any]]] = {
    "age": lambda state: (state.created, state.namespace, state.name),
    "name": lambda state: (state.name, state.namespace),
    "phase": lambda state: (state.phase.value, state.created),
    "pods": lambda state: (state.replicas, state.created),
    "owner": lambda state: (state.owner, state.created),
}


def list_(
    context: Context = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    selector: Annotated[
        str | None, typer.Option("--selector", "-l", metavar="LABELS", help="List jobs with these labels: team=nlp.")
    ] = None,
    mine: Annotated[
        bool, typer.Option("--mine", help="List the jobs that you have submitted from any machine.")
    ] = False,
    phase: Annotated[
        list[str] | None,
        typer.Option("--phase", metavar="PHASE", help="List jobs in this phase: Running, Stuck, … Repeatable."),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="KEY", help="Sort by age (newest last), name, phase, pods or owner.")
    ] = "age",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FORMAT", help="Output format: text, wide (the cause too), json, yaml, name."
        ),
    ] = "text",
) -> None:
    """List jobs, the newest last, with the phase of each and the code of what keeps it from running or ended it."""
    if output not in ("text", "wide", "json", "yaml", "name"):
        raise UsageError(f"--output: must be text, wide, json, yaml or name (is {output!r})")
    if sort not in _KEYS:
        raise UsageError(f"--sort: must be {', '.join(_KEYS)} (is {sort!r})")
    phases = _phases(phase or [])
    if all_namespaces and namespace:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    from flk.cli.table import table
    from flk.jobs.listing import list_states
    from flk.jobs.owner import is_user, user_name
    from flk.jobs.state import SCHEMA
    from flk.observe.client import JobClient, qualified
    from flk.terminal import printable
    from flk.units import short_duration

    client = JobClient.connect(context, namespace)
    states = [
        state
        for state in list_states(client, all_namespaces=all_namespaces, selector=selector)
        if (not phases or state.phase.value in phases) and (not mine or is_user(user_name(), state.owner))
    ]
    states.sort(key=_KEYS[sort])
    if output in ("json", "yaml"):
        data = {"schema": SCHEMA, "items": [state.to_dict() for state in states]}
        if output == "json":
            print(json.dumps(data, indent=2))
        else:
            import yaml

            print(yaml.safe_dump(json.loads(json.dumps(data)), sort_keys=False, allow_unicode=True), end="")
        return
    if output == "name":
        for state in states:
            print(qualified(state.kind, state.name))
        return
    if not states:
        chosen = " that match" if selector or mine or phases else ""
        note(f"there are no jobs{chosen}" + ("" if all_namespaces else f" in namespace {client.namespace}"))
        return
    header = ["NAME", "PHASE", "PODS", "AGE", "OWNER", "REASON"]
    rows = [
        [
            state.name,
            str(state.phase),
            f"{state.ready}/{state.replicas}",
            short_duration(client.now() - state.created),
            state.owner,
            f"{state.reason}: {state.message}" if output == "wide" and state.message else state.reason,
        ]
        for state in states
    ]
    if all_namespaces:
        header = ["NAMESPACE", *header]
        rows = [[state.namespace, *row] for state, row in zip(states, rows, strict=True)]
    print("\n".join(map(printable, table(header, rows))))


def _phases(given: list[str]) -> set[str]:
    from flk.jobs.state import Phase

    known = {phase.value.lower(): phase.value for phase in Phase}
    for text in given:
        if text.lower() not in known:
            raise UsageError(f"--phase: must be one of {', '.join(known.values())} (is {text!r})")
    return {known[text.lower()] for text in given}
