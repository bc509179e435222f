"""`flk list`: list the jobs of a namespace, or of all namespaces."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flk.cli.options import Context, Namespace, note
from flk.errors import UsageError


def list_(
    context: Context = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List jobs in all namespaces.")
    ] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FORMAT", help="Output format: text, json or name.")
    ] = "text",
) -> None:
    """List jobs, the newest last."""
    if output not in ("text", "json", "name"):
        raise UsageError(f"--output: must be text, json or name (is {output!r})")
    if all_namespaces and namespace:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    from flk.cli.table import table
    from flk.jobs.client import JOBS, JobClient
    from flk.jobs.listing import list_states
    from flk.jobs.state import SCHEMA
    from flk.terminal import printable
    from flk.units import short_duration

    client = JobClient.connect(context, namespace)
    states = list_states(client, all_namespaces=all_namespaces)
    if output == "json":
        print(json.dumps({"schema": SCHEMA, "items": [state.to_dict() for state in states]}, indent=2))
        return
    if output == "name":
        for state in states:
            print(f"{JOBS.singular}/{state.name}")
        return
    if not states:
        note("there are no jobs" + ("" if all_namespaces else f" in namespace {client.namespace}"))
        return
    header = ["NAME", "PHASE", "PODS", "AGE", "OWNER", "REASON"]
    rows = [
        [
            state.name,
            str(state.phase),
            f"{state.ready}/{state.replicas}",
            short_duration(client.now() - state.created),
            state.owner,
            state.reason,
        ]
        for state in states
    ]
    if all_namespaces:
        header = ["NAMESPACE", *header]
        rows = [[state.namespace, *row] for state, row in zip(states, rows, strict=True)]
    print("\n".join(map(printable, table(header, rows))))
