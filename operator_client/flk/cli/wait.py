"""`flk wait`: wait until a job ends, and exit with the job's exit code."""

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
        typer.Option("--output", "-o", metavar="FORMAT", help="Output format: json prints the last state on stdout."),
    ] = None,
) -> int | None:
    """Wait until a job ends, and exit with the job's exit code.

    0 done, 100 training failed, 103 deleted, 104 infrastructure, 124 --timeout or the job's deadline is over,
    101 (with --timeout 0) it has not ended, 102 no such job. Reports on stderr what the job does and why it ended.
    """
    if output not in (None, "json"):
        raise UsageError(f"--output: must be json (is {output!r})")
    limit = seconds(timeout, "--timeout")
    from flk.cli.logs import note_detached
    from flk.jobs.client import JobClient
    from flk.jobs.wait import describe, raise_for_state, run_time_text, wait_until_finished
    from flk.terminal import printable

    client = JobClient.connect(context, namespace)

    def report(state: State) -> None:
        if limit != 0:
            note(f"job {describe(state)}")

    try:
        state = wait_until_finished(client, job, timeout=limit, report=report)
    except KeyboardInterrupt:
        note_detached(client, job)
        return int(ExitCode.INTERRUPTED)
    if output:
        print(json.dumps(state.to_dict(), indent=2))
    if state.failure and state.failure.details:
        for line in state.failure.details.splitlines():
            print(f"  {printable(line)}", file=sys.stderr)
    raise_for_state(state, client, limit)
    note(f"job {job} succeeded{run_time_text(state)}")
    return None
