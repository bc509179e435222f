"""`flk wait`: wait until jobs end, and exit with their worst exit code."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flk.cli.options import Context, Namespace, Timeout, note, seconds
from flk.cli.several import Chosen, Jobs, Selector, worst
from flk.errors import FlkError, JobNotFoundError
from flk.user.terminal import printable
from flk_runtime.contract import ExitCode

if TYPE_CHECKING:
    from flk.cli.output import ProgressLine
    from flk.jobs.state import Phase, State
    from flk.jobs.wait import Waited
    from flk.observe.client import JobClient, JobRef


def wait(
    jobs: Jobs = None,
    context: Context = None,
    namespace: Namespace = None,
    selector: Selector = None,
    goal: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="STATE",
            help="Wait until the job is in this state: Running, Succeeded, … Default: until it ends.",
        ),
    ] = None,
    timeout: Timeout = None,
) -> int | None:
    """Wait until a job ends, and exit with the job's exit code; of several jobs, until all have, with the worst code.

    0 done or --for reached, 100 training failed, 103 deleted, 104 infrastructure, 124 --timeout or the job's deadline
    is over, 101 (with --timeout 0) it has not ended, 102 no such job. If the job is gone, the last answer about it
    counts. A job that is stuck, as with an image that does not exist, ends the wait with the code of the cause. Reports
    on stderr what the job does and why it ended, a line for each change; on a terminal, the last line shows how far the
    job is.
    """
    limit = seconds(timeout, "--timeout")
    from flk.cli.logs import note_detached
    from flk.cli.output import ProgressLine
    from flk.jobs.wait import parse_goal

    until = None if goal is None else parse_goal(goal)
    chosen = Chosen.of(jobs, selector, context, namespace, command="wait")
    progress = ProgressLine(sys.stderr, several=chosen.are_several)
    waiting = _Waiting(limit, until, progress)
    try:
        return waiting.conclude_all(chosen)
    except KeyboardInterrupt:
        progress.clear()
        note_detached(chosen, "wait")
        return int(ExitCode.INTERRUPTED)
    finally:
        progress.clear()


@dataclass
class _Waiting:
    """How to wait for each job, and what is known of those for which the wait has ended."""

    limit: int | None
    goal: Phase | None
    progress: ProgressLine

    def conclude_all(self, chosen: Chosen) -> int:
        """Wait for the jobs, and return the worst exit code. Raises the error of a single job."""
        from flk.jobs.wait import wait_for_all

        codes = []
        ended = wait_for_all(
            chosen.client,
            chosen.jobs,
            timeout=self.limit,
            goal=self.goal,
            report=self._report,
            watch=self.progress.show,
        )
        with closing(ended):
            for refs, waited in ended:
                try:
                    codes.append(self._conclude(chosen.client.for_job(refs[0]), refs[0], waited) or 0)
                except FlkError as error:
                    self.progress.clear()
                    codes.append(chosen.failed(refs[0], error, others=refs[1:]))
        return worst(codes)

    def _report(self, state: State) -> None:
        from flk.jobs.wait import describe

        if self.limit != 0:
            self.progress.clear()
            note(f"job {describe(state)}")

    def _conclude(self, client: JobClient, ref: JobRef, waited: Waited | FlkError) -> int | None:
        """Tell how the wait for a job has ended, and return its exit code, or raise the error that has it."""
        from flk.jobs.answer import look
        from flk.jobs.wait import Outcome, Waited, describe, raise_for_state, run_time_text

        if isinstance(waited, JobNotFoundError):
            missing = waited
            try:
                waited = Waited(look(client, ref.name, note).state, Outcome.FINISHED)  # as it was kept
            except JobNotFoundError:
                raise missing from None
        if isinstance(waited, FlkError):
            raise waited
        state = waited.state
        self.progress.drop(state)
        self.progress.clear()
        if waited.outcome == Outcome.REACHED:
            note(f"job {describe(state)}")
            return None
        if state.failure and state.failure.details:
            for line in state.failure.details.splitlines():
                print(f"  {printable(line)}", file=sys.stderr)
        raise_for_state(state, client, waited.outcome, self.limit, goal=self.goal)
        if self.goal is not None:
            note(f"job {ref.name} has ended and was never seen as {self.goal}")
            return int(ExitCode.ERROR)
        note(f"job {ref.name} succeeded{run_time_text(state)}")
        return None
