"""`flk list`: the jobs of a namespace, or of all."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flk.cli.options import Context, Namespace, note
from flk.errors import UsageError


def list_(
    context: Context = None,
    namespace: Namespace = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")] = False,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FORMAT", help="text, json or name.")] = "text",
) -> None:
    """List jobs, the newest last."""
    if output not in ("text", "json", "name"):
        raise UsageError(f"--output: must be text, json or name (is {output!r})")
    if all_namespaces and namespace:
        raise UsageError("--namespace and --all-namespaces exclude each other")
    from flk.cli.table import table
    from flk.jobs import overview
    from flk.jobs.client import JobClient
    from flk.jobs.logs import clean
    from flk.units import short_duration

    cluster = JobClient.connect(context, namespace)
    states = overview.all_jobs(cluster, everywhere=all_namespaces)
    if output == "json":
        from flk.jobs.state import SCHEMA

        print(json.dumps({"schema": SCHEMA, "items": [state.to_dict() for state in states]}, indent=2))
        return
    if output == "name":
        for state in states:
            print(f"{state.namespace}/{state.name}" if all_namespaces else state.name)
        return
    if not states:
        note("there are no jobs" + ("" if all_namespaces else f" in namespace {cluster.namespace}"))
        return
    head = ["NAME", "PHASE", "PODS", "AGE", "OWNER", "REASON"]
    rows = [
        [
            state.name,
            str(state.phase),
            f"{state.ready}/{state.replicas}",
            short_duration(cluster.now() - state.created),
            state.owner,
            state.reason,
        ]
        for state in states
    ]
    if all_namespaces:
        head, rows = ["NAMESPACE", *head], [[s.namespace, *row] for s, row in zip(states, rows, strict=True)]
    print("\n".join(map(clean, table(head, rows))))
