"""`flk wait`: wait until a job ends, and exit with the job's exit code."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, JobName, Namespace, Timeout, note, open_job, seconds
from flk.errors import JobNotFoundError, UsageError
from flk_runtime.contract.exit_codes import ExitCode

if TYPE_CHECKING:
    from flk.jobs.state import State
    from flk.jobs.wait import Goal


def wait(
    job: JobName,
    context: Context = None,
    namespace: Namespace = None,
    goal: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="STATE",
            help="Wait until the job is in this state (Running, Succeeded, …), is deleted (delete), or has this "
            "condition (condition=TYPE). Default: until it ends.",
        ),
    ] = None,
    timeout: Timeout = None,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast/--no-fail-fast",
            help="Stop waiting for a job that cannot go on and that does not resolve by itself (default), or wait on.",
        ),
    ] = True,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FORMAT", help="Output format: json prints the last state on stdout."),
    ] = None,
) -> int | None:
    """Wait until a job ends, and exit with the job's exit code.

    0 done or --for reached, 100 training failed, 103 deleted, 104 infrastructure, 124 --timeout or the job's deadline
    is over, 101 (with --timeout 0) it has not ended, 102 no such job. Of a job that is gone, what flk has archived
    counts. A job that is stuck, as with an image that does not exist, ends the wait with the code of the cause. Reports
    on stderr what the job does and why it ended, a line for each change; on a terminal, the last line shows how far the
    job is.
    """
    if output not in (None, "json"):
        raise UsageError(f"--output: must be json (is {output!r})")
    limit, until = seconds(timeout, "--timeout"), _goal(goal)
    from flk.cli.logs import note_detached
    from flk.cli.progress_line import ProgressLine
    from flk.jobs.wait import Outcome, Waited, describe, get_state, raise_for_state, run_time_text, wait_for
    from flk.terminal import printable

    client, job = open_job(job, context, namespace)

    progress = ProgressLine(sys.stderr)

    def told(text: str) -> None:
        progress.clear()
        note(text)

    def print_state(state: State) -> None:
        if limit != 0:
            told(f"job {describe(state)}")

    try:
        waited = wait_for(
            client,
            job,
            timeout=limit,
            goal=until,
            fail_fast=fail_fast and limit != 0,
            report=print_state,
            watch=progress.show,
            note=told,
        )
    except JobNotFoundError:
        if until is not None and until.is_deletion:
            note(f"there is no job {job} in namespace {client.namespace}")
            return None
        waited = Waited(get_state(client, job, note), Outcome.FINISHED)  # raises the error if nothing is archived
    except KeyboardInterrupt:
        progress.clear()
        note_detached(client, job)
        return int(ExitCode.INTERRUPTED)
    finally:
        progress.clear()
    state = waited.state
    if output:
        print(json.dumps({**state.to_dict(), "outcome": waited.outcome.value}, indent=2))
    if waited.outcome == Outcome.REACHED:
        note(f"job {describe(state)}")
        return None
    if state.failure and state.failure.details:
        for line in state.failure.details.splitlines():
            print(f"  {printable(line)}", file=sys.stderr)
    raise_for_state(state, client, limit, goal=until)
    if until is not None:
        note(f"job {job} has ended and was never seen as {until.text}")
        return int(ExitCode.ERROR)
    note(f"job {job} succeeded{run_time_text(state)}")
    return None


def _goal(text: str | None) -> Goal | None:
    from flk.jobs.wait import Goal

    try:
        return None if text is None else Goal.parse(text)
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None
