"""`flk wait`: until a job ends, with its exit code."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, Timeout, note, seconds
from flk.errors import UsageError
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.jobs.state import State


def wait(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    timeout: Timeout = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FORMAT", help="json: the state at the end, on stdout."),
    ] = None,
) -> int | None:
    """Wait for a job's end, and end with its code.

    0 done, 100 training failed, 103 deleted, 104 infrastructure, 124 --timeout or the job's deadline is over,
    101 (with --timeout 0) it has not ended, 102 no such job. Says on stderr what the job does, and why it ended.
    """
    if output not in (None, "json"):
        raise UsageError(f"--output: must be json (is {output!r})")
    limit = seconds(timeout, "--timeout")
    from flk.cli.logs import detached
    from flk.jobs import wait as waiting
    from flk.jobs.client import JobClient

    cluster = JobClient.connect(context, namespace)

    def tell(state: State) -> None:
        if limit != 0:
            note(f"job {waiting.describe(state)}")

    try:
        state = waiting.until_end(cluster, job, timeout=limit, tell=tell)
    except KeyboardInterrupt:
        detached(cluster, job)
        return int(ExitCode.INTERRUPTED)
    if output:
        print(json.dumps(state.to_dict(), indent=2))
    if state.failure and state.failure.traceback:
        from flk.jobs.logs import clean

        for line in state.failure.traceback.splitlines():
            print(f"  {clean(line)}", file=sys.stderr)
    waiting.conclude(state, limit)
    note(f"job {job} succeeded{waiting.took(state)}")
    return None
