"""Say how a job stands or has ended: a line for people who wait, or the error with the exit code of the contract."""

from __future__ import annotations

from flk.errors import JobDeletedError, JobFailedError, JobRunningError, JobStuckError, WaitTimeoutError
from flk.jobs.state import Phase, State
from flk.jobs.wait.follow import Goal, Outcome
from flk.observe.client import JobClient
from flk.units import short_duration
from flk_runtime.contract.failure import ExitCode
from flk_runtime.contract.quantities import plural


def describe(state: State) -> str:
    """Return one line about a job's state for people who wait."""
    line = f"{state.name} is {state.headline}"
    if state.phase == Phase.RUNNING:
        line += f", {state.ready} of {state.replicas} pods"
        if len(state.attempts) > 1:
            line += f", attempt {state.attempt} after: {state.attempts[-2].cause}"
    elif not state.finished and not state.reason:
        line += f", {state.ready} of {state.replicas} pods are running"
    return line


def progress_text(state: State) -> str:
    """Return how far a job is: pods, attempt, step, rate, loss, remaining time, as far as they are known."""
    parts = [f"{state.ready}/{plural(state.replicas, 'pod')} ready"]
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt}")
    known = max(state.progress, key=lambda progress: progress.step, default=None)
    if known is not None:
        parts.append(f"step {known.step:,}" + (f" of {known.total:,}" if known.total else ""))
        if known.step_time:
            parts.append(f"{1 / known.step_time:.3g} steps/s")
        if known.loss is not None:
            parts.append(f"loss {known.loss:.4g}")
        if known.remaining:
            parts.append(f"{short_duration(known.remaining)} left")
    return ", ".join(parts)


def run_time_text(state: State) -> str:
    """Return how long a finished job ran and in how many attempts: `` after 5m and 2 attempts``; empty if unknown."""
    if not state.started or not state.ended:
        return ""
    attempts = f" and {state.attempt} attempts" if state.attempt > 1 else ""
    return f" after {short_duration(state.ended - state.started)}{attempts}"


def raise_for_state(
    state: State,
    client: JobClient,
    outcome: Outcome = Outcome.FINISHED,
    timeout: float | None = None,
    *,
    goal: Goal | None = None,
) -> None:
    """Return if the job has succeeded; else raise the error that has the exit code of the contract.

    ``outcome`` is why the wait has ended, ``timeout`` the time in seconds that flk has waited for a job that has not
    finished, and ``goal`` the goal of the wait, if it was not the job's end.
    """
    name, command = state.name, client.commands.flk
    if state.phase == Phase.SUCCEEDED:
        return
    if state.phase == Phase.FAILED:
        rank = f" --rank {state.failure.rank}" if state.failure and state.failure.rank is not None else ""
        unretried = f"; {state.no_retry_reason}" if state.no_retry_reason else ""
        raise JobFailedError(
            f"job {name} failed{run_time_text(state)}: {state.message or 'the operator gives no reason'}{unretried}",
            hint=f"{command('status', name)} shows more; {command('logs', name)}{rank} shows what was printed",
            code=ExitCode(state.code),
        )
    if outcome == Outcome.STUCK:
        raise JobStuckError(
            f"job {name} is stuck: {state.message or state.reason}",
            hint=f"{command('why', name)} shows the cause and what to do",
            code=ExitCode((state.cause.exit_code if state.cause else 0) or ExitCode.INFRASTRUCTURE),
        )
    if state.was_deleted:
        raise JobDeletedError(
            f"job {name} is gone: {state.message}", hint=f"{command('why', name)} shows what was seen of it last"
        )
    deletion = goal is not None and goal.is_deletion
    again = command("wait", name) + (f" --for {goal.text}" if goal else "")
    if state.phase == Phase.SUSPENDED and not deletion:
        hint = f"{command('resume', name)} starts it again"
    elif timeout == 0:
        hint = f"{again} waits for {'that' if goal else 'its end'}"
    elif state.phase == Phase.TERMINATING:
        hint = f"it is being deleted; {again} waits again"
    elif state.phase == Phase.STUCK:
        hint = f"{command('why', name)} shows the cause and what to do; {again} waits again"
    else:
        hint = f"{'nobody has deleted it' if deletion else 'the job goes on'}; {again} waits again"
    if timeout == 0:
        raise JobRunningError(f"job {describe(state)}", hint=hint)
    raise WaitTimeoutError(f"the wait ended after {short_duration(timeout or 0)}: job {describe(state)}", hint=hint)
