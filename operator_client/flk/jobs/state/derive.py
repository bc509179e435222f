"""Derive the state of a job from its pods, its events and the launchers' records, by a pure function.

The operator's conditions are not enough: they say Running while a container cannot start, and nothing of attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flk import labels
from flk.diagnose import Picture, PodPhase, PodState, reason_of, root_failure, with_memory_limit
from flk.jobs.state.model import AttemptState, Phase, State
from flk.units import short_duration, timestamp
from flk_runtime.contract import ExitCode, Failure

OPERATOR_DELAY: Final = 15.0  # seconds after a job's creation in which the operator should have seen it
_LAUNCHER_CODES: Final = (ExitCode.USAGE, ExitCode.TRAINING, ExitCode.INFRASTRUCTURE, ExitCode.TIMEOUT)


def derive(picture: Picture) -> State:
    """Return the state of a job that exists."""
    seen, now = picture, picture.now
    meta, annotations = seen.job["metadata"], seen.annotations
    base = State(
        name=meta["name"],
        namespace=meta.get("namespace", ""),
        uid=meta.get("uid", ""),
        phase=Phase.PENDING,
        code=int(ExitCode.RUNNING),
        created=timestamp(meta.get("creationTimestamp")),
        started=min((pod.started for pod in seen.pods if pod.started), default=None),
        replicas=len(seen.pods),
        processes=seen.processes,
        ready=sum(pod.phase in (PodPhase.RUNNING, PodPhase.SUCCEEDED) for pod in seen.pods),
        max_restarts=seen.record.restarts if seen.record else None,
        owner=annotations.get(labels.OWNER, ""),
        image=seen.image,
        code_hash=annotations.get(labels.CODE_HASH, ""),
        pods=seen.pods,
    )
    if seen.failed:
        state = _failed(base, seen)
    elif seen.succeeded:
        state = _succeeded(base, seen)
    else:
        state = _unfinished(base, seen, now)
    attempts = _attempts(seen, state)
    if not attempts:
        return state
    restarts, started = attempts[-1].number - 1, state.started or attempts[0].started
    return replace(state, attempts=attempts, restarts=restarts, started=started)


def deleted(last: State, *, name_reused: bool = False, now: float | None = None) -> State:
    """Return the state of a job that was deleted, from the last state that was seen of it."""
    if last.finished:
        return last
    message = "it was deleted, and another job has its name now" if name_reused else "it was deleted"
    return replace(
        last, phase=Phase.DELETED, code=int(ExitCode.CANCELLED), reason="Deleted", message=message, ended=now, pods=[]
    )


def _failed(base: State, seen: Picture) -> State:
    failure = root_failure(seen)
    condition = seen.conditions.get("Failed") or {}
    message = " ".join(str(condition.get("message", "")).split())
    if failure is None or (failure.kind == "signal" and "deadline" in message):
        if "deadline" in message or condition.get("reason") == "DeadlineExceeded":
            failure = Failure("deadline", 0, pod_name=f"job {base.name}")
            code = ExitCode.TIMEOUT
        else:
            # The operator refused the job, or its pods left no trace. Nothing points to the user's code.
            refused = "Validation" in str(condition.get("reason", ""))
            code = ExitCode.USAGE if refused else ExitCode.INFRASTRUCTURE
    else:
        code = failure.code
        if failure.kind == "exit" and failure.exit_code in _LAUNCHER_CODES:
            code = ExitCode(failure.exit_code)  # a launcher's own code, whose record was lost
    return replace(
        base,
        phase=Phase.FAILED,
        code=int(code),
        reason=reason_of(failure) or str(condition.get("reason", "")),
        message=failure.summary if failure else message,
        failure=failure,
        ended=seen.ended or timestamp(condition.get("lastTransitionTime")) or None,
    )


def _succeeded(base: State, seen: Picture) -> State:
    # Pods of a job that has succeeded may have been deleted since. They have succeeded too.
    pods = [replace(p, phase=PodPhase.SUCCEEDED) if p.phase == PodPhase.MISSING else p for p in seen.pods]
    ready = sum(pod.phase in (PodPhase.RUNNING, PodPhase.SUCCEEDED) for pod in pods)
    started = base.started or timestamp((seen.job.get("status") or {}).get("startTime")) or None
    return replace(
        base,
        phase=Phase.SUCCEEDED,
        code=int(ExitCode.DONE),
        ended=seen.ended,
        started=started,
        pods=pods,
        ready=ready,
    )


def _unfinished(base: State, seen: Picture, now: float) -> State:
    if seen.job["metadata"].get("deletionTimestamp"):
        return replace(base, phase=Phase.TERMINATING, reason="Deleted", message="it is being deleted")
    if seen.suspended:
        if seen.queue:
            return replace(base, phase=Phase.QUEUED, message=f"it waits in queue {seen.queue}")
        return replace(base, phase=Phase.SUSPENDED, message="its spec.runPolicy.suspend is true")
    if not seen.seen_by_operator and all(pod.phase == PodPhase.MISSING for pod in seen.pods):
        age = now - base.created
        if age < OPERATOR_DELAY:
            return base
        message = f"the training operator has not touched it for {short_duration(age)}; does it run in this cluster?"
        return replace(base, reason="NoOperator", message=message)
    if base.ready == base.replicas:
        last = seen.record.attempts[-1] if seen.record and seen.record.attempts else None
        attempt_ended = last is not None and last.failure is not None
        return replace(base, phase=Phase.RESTARTING if attempt_ended else Phase.RUNNING)
    reason, message = _obstacle(seen.pods)
    without_node = any(pod.stuck or pod.phase in (PodPhase.MISSING, PodPhase.PENDING) for pod in seen.pods)
    phase = Phase.RESTARTING if seen.began else Phase.PENDING if without_node else Phase.STARTING
    return replace(base, phase=phase, reason=reason, message=message)


def _obstacle(pods: Sequence[PodState]) -> tuple[str, str]:
    """Return reason and message of what keeps pods from running: the reason that most of them have."""
    stuck = [pod for pod in pods if pod.stuck or pod.phase == PodPhase.UNKNOWN]
    if not stuck:
        return "", ""
    reasons = [pod.reason for pod in stuck]
    reason = max(reasons, key=reasons.count)
    same = [pod for pod in stuck if pod.reason == reason]
    others = f" and {len(same) - 1} other pods" if len(same) > 2 else " and one other pod" if len(same) == 2 else ""
    return reason, f"{same[0].name}{others}: {same[0].message or 'Kubernetes gives no details'}"


def _attempts(seen: Picture, state: State) -> list[AttemptState]:
    record = seen.record
    if record is None:
        return []
    attempts = []
    for attempt in record.attempts:
        failure = with_memory_limit(attempt.failure, seen)
        last = attempt is record.attempts[-1]
        if failure is None and last and state.phase == Phase.FAILED:
            failure = state.failure
        if failure is not None:
            outcome = "failed"
        else:
            outcome = "succeeded" if last and state.phase == Phase.SUCCEEDED else "running"
        ended = attempt.ended if attempt.ended or not (last and state.finished) else state.ended
        cause = failure.summary if failure else ""
        attempts.append(AttemptState(attempt.number + 1, attempt.started, ended, outcome, cause, failure))
    return attempts
