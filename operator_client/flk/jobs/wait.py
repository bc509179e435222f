"""Get the state of a job now, or follow it until it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Final

from flk.errors import JobDeletedError, JobFailedError, JobRunningError, WaitTimeoutError
from flk.jobs.client import JobClient
from flk.jobs.evidence import Recorder
from flk.jobs.evidence.tails import TailReader
from flk.jobs.follower import Follower
from flk.jobs.picture import PictureReader, read_picture
from flk.jobs.state import Phase, PodPhase, State, deleted, derive
from flk.units import short_duration
from flk_runtime import contract

FAILURE_DELAY: Final = 5.0  # seconds that pods of a failed job get to leave a record, after the first has ended
_TAILS: Final = 10.0  # seconds in which the last lines of the pods must have been read


def get_state(client: JobClient, name: str) -> State:
    """Return the state of a job now. Raises JobNotFoundError if there is none."""
    return derive(read_picture(client, name))


def wait_until_finished(
    client: JobClient,
    name: str,
    *,
    uid: str | None = None,
    timeout: float | None = None,
    report: Callable[[State], None] = lambda state: None,
    note: Callable[[str], None] = lambda text: None,
) -> State:
    """Follow a job and return its last state: finished, or after ``timeout`` seconds perhaps not.

    ``report`` is called with every state whose headline or attempt is new, ``note`` with what flk says of itself.
    """
    reported: tuple[str, int] | None = None
    current: State | None = None
    failed_at: float | None = None
    with closing(_states(client, name, uid, timeout, note)) as states:
        for current in states:
            if (current.headline, current.restarts) != reported and not current.finished:
                reported = (current.headline, current.restarts)
                report(current)
            if current.finished:
                # The first pod that ends may not know the cause. Wait a moment for the records of the others.
                failed_at = failed_at or time.monotonic()
                running = any(pod.exit_code is None and pod.phase == PodPhase.RUNNING for pod in current.pods)
                if current.phase == Phase.FAILED and running and time.monotonic() - failed_at < FAILURE_DELAY:
                    continue
                break
    assert current is not None  # noqa: S101 - without a state the follower raises
    return current


def describe(state: State) -> str:
    """Return one line about a job's state for people who wait."""
    line = f"{state.name} is {state.headline}"
    if state.phase == Phase.RUNNING:
        line += f", {state.ready} of {state.replicas} pods"
        if len(state.attempts) > 1:
            line += f", attempt {state.restarts + 1} after: {state.attempts[-2].cause}"
    elif not state.finished and not state.reason:
        line += f", {state.ready} of {state.replicas} pods are running"
    return line


def run_time_text(state: State) -> str:
    """Return how long a finished job ran and in how many attempts: `` after 5m and 2 attempts``; empty if unknown."""
    if not state.started or not state.ended:
        return ""
    attempts = f" and {state.restarts + 1} attempts" if state.restarts else ""
    return f" after {short_duration(state.ended - state.started)}{attempts}"


def raise_for_state(state: State, client: JobClient, timeout: float | None = None) -> None:
    """Return if the job has succeeded; else raise the error that has the exit code of the contract.

    ``timeout`` is the time in seconds that flk has waited for a job that has not finished.
    """
    name = state.name
    if state.phase == Phase.SUCCEEDED:
        return
    if state.phase == Phase.FAILED:
        rank = f" --rank {state.failure.rank}" if state.failure and state.failure.rank is not None else ""
        raise JobFailedError(
            f"job {name} failed{run_time_text(state)}: {state.message or 'the operator gives no reason'}",
            hint=f"{client.command('status', name)} shows more; {client.command('logs', name)}{rank} shows what was "
            "printed",
            code=contract.ExitCode(state.code),
        )
    if state.phase == Phase.DELETED:
        raise JobDeletedError(f"job {name} is gone: {state.message}")
    if timeout == 0:
        raise JobRunningError(f"job {describe(state)}", hint=f"{client.command('wait', name)} waits for its end")
    raise WaitTimeoutError(
        f"the wait ended after {short_duration(timeout or 0)}: job {describe(state)}",
        hint=f"the job goes on; {client.command('wait', name)} waits again",
    )


def _states(
    client: JobClient, name: str, uid: str | None, timeout: float | None, note: Callable[[str], None]
) -> Generator[State, None, None]:
    """Yield the states of a job, at least one a second. Ends when it was deleted, and when the time is over.

    What is seen is kept as evidence.
    """
    until = None if timeout is None else time.monotonic() + timeout
    reader, recorder = PictureReader(client), Recorder(client, note=note)
    tails = TailReader(client, recorder)
    last: State | None = None
    try:
        with Follower(client, name, uid) as follower:
            for seen in follower.updates():
                if seen.job is None:
                    if last is None:
                        last = State(name, client.namespace, uid or "", Phase.PENDING, int(contract.ExitCode.RUNNING))
                    last = deleted(last, name_reused=seen.name_reused, now=client.now())
                    recorder.observe(seen, state=last)
                    yield last
                    return
                last = derive(reader.picture(seen))
                recorder.observe(seen, events=reader.last_events, record=reader.last_record, state=last)
                tails.consider(seen.pods)
                yield last
                if until is not None and time.monotonic() >= until:
                    return
    finally:
        tails.close(_TAILS)
        recorder.close()
