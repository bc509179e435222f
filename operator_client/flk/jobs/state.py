"""The state of a job: plain data, derived from its objects, its events and the launchers' records by pure functions.

`derive` makes a `State` of a job that exists, `deleted` of one that does not exist any more. The operator's conditions
are not enough: they say Running while a container cannot start, and nothing of attempts. Commands, `flk.jobs.wait` and
`flk.jobs.logs` read it; nothing here sends a request.
"""

from __future__ import annotations

from typing import Any, Final

from flk.errors import FlkError
from flk.kube import Object
from flk.observe.model import Finding, PodPhase, PodState
from flk.observe.pods import CLOCK_SKEW, one_line
from flk.observe.progress import Progress
from flk.observe.view import JobView
from flk.spec import labels
from flk.spec.units import created_at, timestamp
from flk.targets import target_of
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.quantities import parse_ranges
from flk_runtime.contract.record import Goodput, QuarantinedNode, SlowRank
from flk_runtime.contract.values import StrEnum, asdict, dataclass, field, replace

SCHEMA: Final = "flk.dev/state/v1"  # of the JSON that `-o json` prints


class Phase(StrEnum):
    """Where a job is in its life. `status`, `list`, `wait`, the JSON output and Python use these words."""

    QUEUED = "Queued"  # it waits for a queue to admit it
    PENDING = "Pending"  # pods are missing or have no node yet; that may resolve by itself
    STARTING = "Starting"  # all pods have a node; their containers start
    RUNNING = "Running"
    RESTARTING = "Restarting"  # an attempt has ended and the next one has not begun
    STUCK = "Stuck"  # it cannot go on, and that does not resolve by itself
    SUSPENDED = "Suspended"  # spec.runPolicy.suspend is true, and no queue sets it
    PREEMPTED = "Preempted"  # it lost its pods to a job of higher priority and waits to start again
    TERMINATING = "Terminating"  # it is being deleted
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"
    UNKNOWN = "Unknown"  # its object has values that cannot be read


@dataclass(frozen=True)
class AttemptState:
    """One start of all ranks together, numbered from 1. Times are in seconds since the epoch."""

    number: int
    started: float
    ended: float | None
    outcome: str  # running, succeeded, failed, preempted, deleted, resized: pods joined or left an elastic job
    cause: str = ""  # one line
    pods: int = 0  # that took part; 0: unknown
    failure: Failure | None = None
    restored: int | None = None  # the step after which its ranks began; None: they do not say
    restored_from: str = ""  # start, memory (of the pods) or storage
    steps_lost: int | None = None  # that the attempt before had made after that step


@dataclass(frozen=True)
class State:
    """Everything that flk reports about a job. Times are in seconds since the epoch."""

    name: str
    namespace: str
    uid: str
    phase: Phase
    code: int  # exit code of `flk wait`, if it ended now
    reason: str = ""  # one word
    message: str = ""  # one line: why the job is in this phase
    since: float | None = None  # when the phase began
    cause: Finding | None = None  # what keeps the job from running, or ended it
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    kind: str = "PyTorchJob"  # of the object
    replicas: int = 0  # pods that the job should have now, spares included
    size: int = 0  # pods that train in the latest attempt; 0: unknown
    min_size: int = 0  # how few pods may train
    max_size: int = 0  # how many pods may train
    spares: int = 0  # pods that wait to take the place of a lost one
    processes: int = 1  # ranks in each pod
    workers: int = 1  # groups of pods that make steps of their own, as with strategy diloco
    ready: int = 0  # pods that run or have succeeded
    restarts: int = 0  # used: attempts that followed failures of the training code
    max_restarts: int | None = None
    disruptions: int = 0  # used: attempts that followed disruptions, lost or preempted pods for example
    max_disruptions: int | None = None
    no_retry_reason: str = ""  # why no attempt follows its failure
    warning: str = ""  # what is probably wrong although it has succeeded
    owner: str = ""
    image: str = ""
    code_hash: str = ""
    failure: Failure | None = None
    attempts: list[AttemptState] = field(default_factory=list)
    slow: list[SlowRank] = field(default_factory=list)  # ranks that the others wait for
    quarantine: list[QuarantinedNode] = field(default_factory=list)  # nodes that its pods avoid for a while
    goodput: Goodput | None = None  # what the time of the job has gone into, as far as that was told
    saved_step: int | None = None  # of the newest checkpoint, as far as that was told
    stored_step: int | None = None  # of the newest checkpoint in storage
    pods: list[PodState] = field(default_factory=list)
    unread: str = ""  # why the record of the launchers could not be read; empty: it was, or there is none
    progress: list[Progress] = field(default_factory=list)  # of the ranks that print metrics

    @property
    def attempt(self) -> int:
        """Number of the latest attempt, from 1."""
        return self.attempts[-1].number if self.attempts else 1

    @property
    def finished(self) -> bool:
        """Whether the job has ended, well or badly, or was deleted."""
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.DELETED)

    @property
    def was_deleted(self) -> bool:
        """Whether the job was deleted before it had ended."""
        return self.phase == Phase.DELETED

    @property
    def world_size(self) -> int:
        """Number of ranks in the latest attempt, or in the next one as far as that is known."""
        return (self.size or self.replicas - self.spares) * self.processes

    @property
    def headline(self) -> str:
        """The phase and its reason, in one line."""
        reason = "" if self.reason == self.phase.value else self.reason
        return ": ".join(filter(None, (self.phase.value.lower(), reason, self.message)))

    @property
    def sentence(self) -> str:
        """The name with the headline: "gpt has succeeded"."""
        return f"{self.name} {'has' if self.phase in (Phase.SUCCEEDED, Phase.FAILED) else 'is'} {self.headline}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `-o json`, with the version of its schema."""
        data = {"schema": SCHEMA, **asdict(self), "phase": self.phase.value, "world_size": self.world_size}
        for pod in data["pods"]:
            del pod["record"], pod["failed_permanently"]
            pod["phase"] = pod["phase"].value
        data["failure"] = self.failure and {**asdict(self.failure), "summary": self.failure.summary}
        data["bad_nodes"] = [each.node for each in self.quarantine]
        data["goodput"] = self.goodput and {**asdict(self.goodput), "share": self.goodput.share}
        for failure in (data["failure"], *(attempt["failure"] for attempt in data["attempts"])):
            if failure:
                failure["attempt"] += 1  # launchers count from 0
        return data


def derive(seen: JobView) -> State:
    """Return the state of a job that exists."""
    facts = _facts(seen)
    if seen.succeeded and not seen.failed:
        state = _succeeded(facts, seen)
    else:
        from flk.health import find  # and all causes, which a list of jobs that have succeeded does not need

        cause = next(iter(find(seen)), None)
        facts = replace(facts, cause=cause)
        state = _failed(facts, seen, cause) if seen.failed else _unfinished(facts, seen, cause)
    attempts = _attempts(seen, state)
    if attempts:
        began = min(attempts[0].started, state.started or attempts[0].started)  # a pod may have been created again
        state = replace(state, attempts=attempts, started=began)
    outcome = seen.record and seen.record.outcome  # after a success, nobody waits for pods that still end
    if state.phase is Phase.RESTARTING and not state.message and outcome != "succeeded":
        state = replace(state, message=_awaited(seen))
    state = replace(state, since=_since(state, seen))
    return state if seen.gone is None else deleted(state, now=seen.gone)


def _facts(seen: JobView) -> State:
    """Return what is known of a job whatever its phase. The phase and what depends on it follow."""
    facts = State(
        name=seen.name,
        namespace=seen.namespace,
        uid=seen.uid,
        phase=Phase.PENDING,
        code=int(ExitCode.RUNNING),
        created=seen.created,
        started=seen.started,
        kind=seen.kind,
        replicas=len(seen.pods),
        size=len(seen.members) if seen.resizable else 0,
        min_size=seen.sizes[0],
        max_size=seen.sizes[1],
        spares=seen.spares,
        quarantine=seen.quarantine,
        processes=seen.processes,
        workers=seen.workers,
        ready=sum(pod.is_up for pod in seen.pods),
        owner=seen.annotations.get(labels.OWNER, ""),
        image=seen.image,
        slow=seen.slow,
        goodput=seen.goodput,
        code_hash=seen.annotations.get(labels.CODE_HASH, ""),
        pods=seen.pods,
        unread=seen.unread_record,
        progress=list(seen.seen.progress),
    )
    record = seen.record
    if record is None:
        return facts
    return replace(
        facts,
        restarts=record.restarts,
        max_restarts=record.max_restarts,
        disruptions=record.disruptions,
        max_disruptions=record.max_disruptions,
        saved_step=record.saved,
        stored_step=record.stored,
    )


def _awaited(seen: JobView) -> str:
    """Return what the next attempt of a job waits for."""
    from flk.health.cause import subject

    away = [pod for pod in seen.pods if not pod.is_up and (not seen.resizable or pod.index in seen.members)]
    return f"it waits for {subject(away)} to run again" if away else "the launchers meet for the next attempt"


def unreadable(job: Object, error: Exception) -> State:
    """Return the state of a job whose objects cannot be read because of this error."""
    meta, told = job["metadata"], isinstance(error, FlkError)
    return State(
        name=str(meta["name"]),
        namespace=str(meta.get("namespace") or ""),
        uid=str(meta.get("uid") or ""),
        phase=Phase.UNKNOWN,
        code=int(ExitCode.ERROR),
        reason="Unreadable",
        message=str(error) if told else f"flk cannot read its objects: {type(error).__name__}",
        created=timestamp(meta.get("creationTimestamp")),
        kind=target_of(job).kind,
        owner=str(labels.annotations_of(job).get(labels.OWNER, "")),
    )


def deleted(last: State, *, name_reused: bool = False, now: float | None = None) -> State:
    """Return the state of a job that was deleted, from the last state that was seen of it."""
    if last.finished:
        return last
    message = "it was deleted, and another job has its name now" if name_reused else "it was deleted"
    attempts = [
        replace(each, outcome="deleted", ended=now) if each.outcome == "running" else each for each in last.attempts
    ]
    return replace(
        last,
        phase=Phase.DELETED,
        code=int(ExitCode.CANCELLED),
        reason="Deleted",
        message=message,
        ended=now,
        attempts=attempts,
        pods=[],
    )


def _failed(facts: State, seen: JobView, cause: Finding | None) -> State:
    from flk.health import job_failure

    condition = seen.conditions.get("Failed") or {}
    return replace(
        facts,
        phase=Phase.FAILED,
        code=cause.exit_code if cause else int(ExitCode.INFRASTRUCTURE),
        reason=cause.code if cause else "",
        message=cause.sentence if cause else one_line(condition.get("message")),
        failure=job_failure(seen),
        no_retry_reason=next((r.no_retry_reason for r in seen.records if r.failure and r.no_retry_reason), ""),
        ended=seen.ended or timestamp(condition.get("lastTransitionTime")) or None,
    )


def _succeeded(facts: State, seen: JobView) -> State:
    # Pods of a job that has succeeded may have been deleted since. They have succeeded too.
    pods = [replace(p, phase=PodPhase.SUCCEEDED) if p.absent else p for p in seen.pods]
    ready = sum(pod.is_up for pod in pods)
    started = facts.started or timestamp(seen.status.get("startTime")) or None
    return replace(
        facts,
        phase=Phase.SUCCEEDED,
        code=int(ExitCode.DONE),
        ended=seen.ended,
        started=started,
        warning=seen.record.warning if seen.record else "",
        pods=pods,
        ready=ready,
    )


def _unfinished(facts: State, seen: JobView, cause: Finding | None) -> State:
    if seen.deletion_began:
        return replace(
            facts,
            phase=Phase.TERMINATING,
            reason="Deleted",
            message=f"it is being deleted{seen.seen.kept_by_finalizers}",
            cause=None,
        )
    phase = _phase(seen, cause)
    if cause is None:
        return replace(facts, phase=phase)
    code = cause.exit_code if phase is Phase.STUCK else facts.code
    return replace(facts, phase=phase, code=code, reason=cause.code, message=cause.sentence)


def _phase(seen: JobView, cause: Finding | None) -> Phase:
    """Return the phase of a job that has not ended and is not being deleted. The first answer that fits counts."""
    stuck = cause is not None and cause.is_stuck(seen.now)
    if seen.suspended and not (seen.queue and stuck):  # a queue that is stuck starts nothing: Kueue is not there
        if cause is not None and cause.code in ("PreemptedByQueue", "WorkloadDeactivated"):
            return Phase.PREEMPTED
        return Phase.QUEUED if seen.queue else Phase.SUSPENDED
    if _trains_with_some_pods(seen) or seen.runs_elsewhere:
        return Phase.RUNNING
    if cause is not None and stuck and not _others_suffice(seen, cause):
        return Phase.STUCK
    if cause is not None and cause.code == "Preempted":
        return Phase.PREEMPTED
    if all(pod.is_up for pod in seen.pods):
        return _phase_with_all_pods(seen, cause)
    if seen.began:
        return Phase.RESTARTING
    without_node = any(pod.phase in (PodPhase.MISSING, PodPhase.PENDING) for pod in seen.pods)
    return Phase.PENDING if without_node else Phase.STARTING


def _phase_with_all_pods(seen: JobView, cause: Finding | None) -> Phase:
    """Return the phase of a job whose pods all run. The record lags behind them until their launchers have met."""
    last = seen.latest_attempt
    # The attempt has failed. Or a container has started since, which has no launcher of the attempt in it; where fewer
    # pods may take part, it may be that of another pod.
    if last is not None and (last.failure or (not seen.resizable and _started_since(last.started, seen))):
        return Phase.RESTARTING
    if cause is None:
        return Phase.RUNNING
    if last is None and seen.from_flk:
        return Phase.STARTING  # the launchers have not met yet
    from flk.health import cause_of

    known = cause_of(cause.code)
    return Phase.RUNNING if known is not None and known.goes_on else Phase.RESTARTING


def _trains_with_some_pods(seen: JobView) -> bool:
    """Return whether an attempt of an elastic job or a job with spares runs, whatever its other pods do."""
    last = seen.latest_attempt
    if not seen.resizable or last is None or last.ended is not None:
        return False
    running = {pod.index for pod in seen.pods if pod.phase == PodPhase.RUNNING}
    return bool(seen.members) and running >= set(seen.members)


def _others_suffice(seen: JobView, cause: Finding) -> bool:
    """Return whether enough pods of an elastic job run for an attempt, beside those that the cause keeps away."""
    up = [pod for pod in seen.pods if pod.is_up]
    leads = any(pod.index == 0 for pod in up)
    return seen.resizable and leads and len(up) >= seen.sizes[0] and not {pod.name for pod in up} & set(cause.pods)


def _started_since(began: float, seen: JobView) -> list[float]:
    """Return when containers have started since an attempt ``began``, by the clocks of their nodes."""
    return [pod.started for pod in seen.pods if pod.started and pod.started > began + CLOCK_SKEW]


def _disturbed(seen: JobView, last: AttemptState | None) -> float | None:
    """Return when a pod was last deleted, ended or made anew; None if no pod tells it."""
    deleted = [timestamp(pod["metadata"].get("deletionTimestamp")) for pod in seen.objects.values()]
    troubled = [pod for pod in seen.pods if not pod.is_up]
    made = [created_at(seen.objects[pod.name]) for pod in troubled if pod.name in seen.objects]
    ended = [pod.ended or 0.0 for pod in troubled]
    started = _started_since(last.started if last else seen.now, seen)
    return max([*deleted, *made, *ended, *started], default=0.0) or None


def _since(state: State, seen: JobView) -> float | None:
    """Return when the phase began, as far as the objects tell."""
    suspended = seen.conditions.get("Suspended") or {}
    last = state.attempts[-1] if state.attempts else None
    begun: dict[Phase, float | None] = {
        Phase.SUCCEEDED: state.ended,
        Phase.FAILED: state.ended,
        Phase.TERMINATING: seen.deletion_began,
        Phase.SUSPENDED: timestamp(suspended.get("lastTransitionTime")),
        Phase.QUEUED: timestamp(suspended.get("lastTransitionTime")),
        Phase.RUNNING: last.started if last else max((pod.started or 0.0 for pod in seen.pods), default=0.0),
        Phase.RESTARTING: (last.ended if last else None) or _disturbed(seen, last),
    }
    if state.phase is Phase.RESTARTING and not begun[state.phase]:
        return None  # nothing tells it; the time of the job's creation would be wrong
    return begun.get(state.phase) or (state.cause.since if state.cause else None) or state.created or None


def _attempts(seen: JobView, state: State) -> list[AttemptState]:
    record = seen.record
    if record is None:
        return []
    attempts = []
    reached: int | None = None  # the last step of the attempt before
    for attempt in record.attempts:
        failure = attempt.failure
        if failure is not None:
            from flk.health import with_memory_limit

            failure = with_memory_limit(failure, seen)
        last = attempt is record.attempts[-1]
        cause = failure.summary if failure else ""
        if failure is None and last and state.phase == Phase.FAILED:
            outcome, cause, failure = "failed", state.message, state.failure
        elif failure is not None:
            outcome = str(failure.kind) if failure.kind in (Kind.PREEMPTED, Kind.RESIZED) else "failed"
        else:
            outcome = "succeeded" if last and state.phase == Phase.SUCCEEDED else "running"
        ended = attempt.ended if attempt.ended or not (last and state.finished) else state.ended
        lost = None if attempt.restored is None or reached is None else max(0, reached - attempt.restored)
        attempts.append(
            AttemptState(
                number=attempt.number + 1,
                started=attempt.started,
                ended=ended,
                outcome=outcome,
                cause=cause,
                pods=len(parse_ranges(attempt.pods)),
                failure=failure,
                restored=attempt.restored,
                restored_from=attempt.restored_from,
                steps_lost=lost,
            )
        )
        reached = attempt.step
    return attempts
