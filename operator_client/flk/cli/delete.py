"""`flk delete`: delete jobs with everything that belongs to them."""

from __future__ import annotations

from typing import Annotated

import typer

from flk.cli.options import Context, Namespace, Timeout, job_name, note, seconds
from flk_runtime.contract import ExitCode


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names of the jobs.", show_default=False)],
    context: Context = None,
    namespace: Namespace = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the pods are gone (default), or return at once.")
    ] = True,
    timeout: Timeout = None,
) -> int | None:
    """Delete jobs with their pods and ConfigMaps.

    Prints the names of the deleted jobs on stdout. Exits with 102 if there is no job of one of the names; the others
    are deleted all the same.
    """
    limit = seconds(timeout, "--timeout")
    names = list(dict.fromkeys(map(job_name, jobs)))
    from flk.jobs.client import JobClient
    from flk.jobs.lifecycle.deletion import delete_jobs

    client = JobClient.connect(context, namespace)
    missing = 0
    for name, existed in delete_jobs(client, names, wait=wait, timeout=limit, report=note):
        if existed:
            print(name, flush=True)
        else:
            missing += 1
            note(f"there is no job {name} in namespace {client.namespace}")
    return int(ExitCode.NOT_FOUND) if missing else None
