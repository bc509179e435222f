"""Names of jobs for the completion of shells, read from the cluster within a second."""

from __future__ import annotations

from typing import Any, Final

import typer

from flk.errors import FlkError

TIMEOUT: Final = 1.0  # seconds for the API server: a completion must not take longer


def job_names(context: typer.Context) -> list[str]:
    """Return the names of the jobs in the namespace that the words so far choose, sorted; none after an error."""
    from flk.commands import Connection
    from flk.kube import ConnectionOptions, set_connection_options
    from flk.observe.client import JobClient

    try:
        fields = ("kubeconfig", "cluster", "server", "account", "token")
        connection = Connection(**{name: str(_chosen(context, name) or "") for name in fields})
        set_connection_options(ConnectionOptions(connection, request_timeout=TIMEOUT))
        client = JobClient.connect(_chosen(context, "context"), _chosen(context, "namespace"))
        items = client.list_jobs(metadata_only=True)
    except FlkError:
        return []
    return sorted(str(item["metadata"]["name"]) for item in items)


def _chosen(context: typer.Context, name: str) -> Any:
    """Return the value of an option that stands after the subcommand, or before it."""
    parent = context.parent.params if context.parent else {}
    return context.params.get(name) or parent.get(name)
