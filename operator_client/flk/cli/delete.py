"""`flk delete`: jobs and all that belongs to them."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import Context, Namespace, Timeout, note, seconds
from flk_runtime.contract import ExitCode


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of the jobs.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the pods are gone, or come back at once.")
    ] = True,
    timeout: Timeout = None,
) -> int | None:
    """Delete jobs, with their pods and all else that belongs to them.

    Prints the names of those deleted on stdout. Ends with 102 if there is no job of one of the names; the others are
    deleted all the same.
    """
    limit = seconds(timeout, "--timeout")
    from flk.jobs.client import JobClient
    from flk.jobs.deletion import delete_jobs

    cluster = JobClient.connect(context, namespace)
    missing = 0
    for name, gone in delete_jobs(cluster, list(dict.fromkeys(jobs)), wait=wait, timeout=limit, tell=note):
        if gone:
            print(name, flush=True)
        else:
            missing += 1
            note(f"there is no job {name} in namespace {cluster.namespace}")
    return int(ExitCode.NOT_FOUND) if missing else None
