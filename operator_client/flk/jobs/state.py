"""What is true of a job, from its pods, its events and its launchers' own record: a pure function.

The operator's conditions alone do not tell: they say Running while a container cannot start, and nothing of attempts.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from flk import labels
from flk.jobs import pods as podstate
from flk.jobs.pods import PodState
from flk.kube.resources import Object
from flk.units import short_duration, timestamp
from flk_runtime.contract import CONTAINER, ExitCode, Failure, JobRecord

SCHEMA: Final = "flk.dev/state/v1"
SILENCE: Final = 15.0  # seconds without any sign of the operator that are worth telling
_ROLES: Final = ("Master", "Worker")  # in the order of the pods' indexes
_CONTAINER_ENDED: Final = re.compile(
    r"Error pod (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL
)
_CLOCKS: Final = 5.0  # seconds that clocks of nodes may differ
_FINAL_CODES: Final = (ExitCode.USAGE, ExitCode.TRAINING, ExitCode.INFRASTRUCTURE, ExitCode.TIMEOUT)


class Phase(str, enum.Enum):
    """Where a job is in its life."""

    PENDING = "Pending"  # something is missing: nodes, an image, a quota, the operator
    QUEUED = "Queued"  # suspended, until a queue lets it start
    STARTING = "Starting"  # all pods have a node and become ready
    RUNNING = "Running"
    RESTARTING = "Restarting"  # an attempt has ended, the next one has not begun
    STOPPING = "Stopping"  # being deleted
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"

    def __str__(self) -> str:
        return self.value


FINAL: Final = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.DELETED})


@dataclass(frozen=True)
class AttemptState:
    """One start of all ranks together, numbered from 1."""

    number: int
    started: float
    ended: float | None
    outcome: str  # running, succeeded, failed
    cause: str = ""  # one line
    failure: Failure | None = None


@dataclass(frozen=True)
class State:
    """All that flk tells of a job. Times are seconds since the epoch."""

    name: str
    namespace: str
    uid: str
    phase: Phase
    code: int  # of the contract: what `flk wait` would end with now
    reason: str = ""  # one word
    message: str = ""  # one line: why it is in this phase
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    replicas: int = 0
    processes: int = 1  # ranks in each pod
    ready: int = 0  # pods that run, or have ended well
    restarts: int = 0  # attempts after the first
    max_restarts: int | None = None
    owner: str = ""
    image: str = ""
    code_hash: str = ""
    failure: Failure | None = None
    attempts: list[AttemptState] = field(default_factory=list)
    pods: list[PodState] = field(default_factory=list)

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return self.phase in FINAL

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.replicas * self.processes

    @property
    def headline(self) -> str:
        """One line: the phase, and why."""
        told = f"{self.reason}: {self.message}" if self.reason and self.message else self.reason or self.message
        return f"{self.phase.value.lower()}: {told}" if told else self.phase.value.lower()

    def to_dict(self) -> dict[str, Any]:
        """For `-o json`: with the version of this schema."""
        data = {"schema": SCHEMA, **asdict(self), "phase": self.phase.value, "world_size": self.world_size}
        for pod in data["pods"]:
            del pod["record"], pod["final"]
        data["failure"] = self.failure and {**asdict(self.failure), "summary": self.failure.summary}
        return data


def derive(
    job: Object,
    pods: Iterable[Object],
    *,
    now: float,
    events: Sequence[Object] = (),
    record: JobRecord | None = None,
    former: Mapping[str, Object] | None = None,
) -> State:
    """The state of a job that is there.

    ``events`` are those of the job and of its pods, oldest first; ``record`` is what the launcher of pod 0 last said in
    its log; ``former`` are ended pods by the names that other pods have now; ``now`` is by the API server's clock.
    """
    former = former or {}
    facts = _Facts(job, list(pods), events, record, former)
    meta, notes = job["metadata"], job["metadata"].get("annotations") or {}
    base = State(
        name=meta["name"],
        namespace=meta.get("namespace", ""),
        uid=meta.get("uid", ""),
        phase=Phase.PENDING,
        code=int(ExitCode.RUNNING),
        created=timestamp(meta.get("creationTimestamp")),
        started=min((pod.started for pod in facts.pods if pod.started), default=None),
        replicas=len(facts.pods),
        processes=facts.processes,
        ready=sum(pod.phase in (podstate.RUNNING, podstate.SUCCEEDED) for pod in facts.pods),
        max_restarts=facts.record.restarts if facts.record else None,
        owner=notes.get(labels.OWNER, ""),
        image=facts.image,
        code_hash=notes.get(labels.CODE_HASH, ""),
        pods=facts.pods,
    )
    if facts.failed:
        state = _failed(base, facts)
    elif facts.succeeded:
        state = replace(base, phase=Phase.SUCCEEDED, code=int(ExitCode.DONE), ended=facts.ended)
    else:
        state = _unfinished(base, facts, now)
    attempts = _attempts(facts, state)
    if attempts:
        state = replace(
            state, attempts=attempts, restarts=attempts[-1].number - 1, started=state.started or attempts[0].started
        )
    return state


def deleted(last: State, *, replaced: bool = False, now: float | None = None) -> State:
    """The state of a job that is gone, from the last one that was seen of it."""
    if last.final:
        return last
    what = "it was deleted, and another job has its name now" if replaced else "it was deleted"
    return replace(
        last, phase=Phase.DELETED, code=int(ExitCode.CANCELLED), reason="Deleted", message=what, ended=now, pods=[]
    )


class _Facts:
    """What is read out of the objects, before it is put together."""

    def __init__(
        self,
        job: Object,
        pods: list[Object],
        events: Sequence[Object],
        record: JobRecord | None,
        former: Mapping[str, Object],
    ) -> None:
        self.job, self.events, self.former, self.raw = job, events, former, pods
        spec = job.get("spec") or {}
        self.policy = spec.get("runPolicy") or {}
        self.specs = {role: s for role, s in (spec.get("pytorchReplicaSpecs") or {}).items() if role in _ROLES}
        count = str(spec.get("nprocPerNode") or "1")
        self.processes = int(count) if count.isdigit() else 1
        status = job.get("status") or {}
        self.conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
        self.known = bool(status.get("conditions"))
        self.pods = self._pods(pods)
        self.image = self._image()
        verdicts = [pod.record for pod in self.pods if pod.record]
        self.verdicts = [*verdicts, *([record] if record else [])]
        # The one that knows of most attempts, and among these the one that knows the end.
        self.record = max(
            self.verdicts,
            key=lambda v: (v.attempts[-1].number if v.attempts else -1, v.outcome in ("failed", "succeeded")),
            default=None,
        )
        self.ended = max((pod.ended for pod in self.pods if pod.ended), default=None) or (
            timestamp(status.get("completionTime")) or None
        )

    @property
    def failed(self) -> bool:
        return (
            "Failed" in self.conditions
            or any(pod.final for pod in self.pods)
            or any(record.outcome == "failed" for record in self.verdicts)
        )

    @property
    def succeeded(self) -> bool:
        if "Succeeded" in self.conditions:
            return True
        all_done = bool(self.pods) and all(pod.phase == podstate.SUCCEEDED for pod in self.pods)
        return all_done and "Master" not in self.specs

    @property
    def began(self) -> bool:
        """Whether an attempt has been under way before."""
        restarted = any(pod.restarts for pod in self.pods) or bool(self.former) or "Restarting" in self.conditions
        return restarted or bool(self.record and self.record.attempts)

    def about(self, pod: str) -> list[Object]:
        """Events about a pod."""
        return [e for e in self.events if _involved(e, "kind") == "Pod" and _involved(e, "name") == pod]

    @property
    def of_job(self) -> list[Object]:
        """Events about the job itself."""
        return [e for e in self.events if _involved(e, "kind") != "Pod"]

    def _pods(self, pods: list[Object]) -> list[PodState]:
        found = {}
        for pod in pods:
            own = pod["metadata"].get("labels") or {}
            found[own.get(labels.REPLICA_TYPE, "worker"), own.get(labels.REPLICA_INDEX, "0")] = pod
        states: list[PodState] = []
        name = self.job["metadata"]["name"]
        for role in _ROLES:
            spec = self.specs.get(role)
            if spec is None:
                continue
            for number in range(int(spec.get("replicas") or 1)):
                index = len(states)
                ranks = list(range(index * self.processes, (index + 1) * self.processes))
                there = found.get((role.lower(), str(number)))
                if there is None:
                    states.append(podstate.missing(index, f"{name}-{role.lower()}-{number}", ranks, self.of_job))
                else:
                    about = self.about(there["metadata"]["name"])
                    restart = str(spec.get("restartPolicy") or "")
                    states.append(podstate.of(there, index, ranks, restart=restart, events=about))
        return states

    def _image(self) -> str:
        for spec in self.specs.values():
            for container in ((spec.get("template") or {}).get("spec") or {}).get("containers") or []:
                if container.get("name") == CONTAINER:
                    return str(container.get("image") or "")
        return ""

    def killed_by_memory(self, name: str, since: float) -> bool:
        """Whether there is a trace of a pod whose container was killed at its memory limit after ``since``."""
        pods = [pod for pod in [*self.raw, *self.former.values()] if pod["metadata"]["name"] == name]
        if any(podstate.was_killed_by_memory(pod) for pod in pods):
            return True
        # The operator deletes such a pod at once; its event is all that stays.
        return any(
            e.get("reason") == "OOMKilled"
            and str(e.get("message", "")).startswith(f"Error pod {name} ")
            and timestamp(e.get("lastTimestamp")) >= since - _CLOCKS
            for e in self.of_job
        )

    def memory_limit(self, name: str) -> str:
        limits = [podstate.memory_limit(pod) for pod in self.raw if pod["metadata"]["name"] == name]
        return next(filter(None, limits), "")


def _involved(event: Object, key: str) -> Any:
    return (event.get("involvedObject") or {}).get(key)


def _failed(base: State, facts: _Facts) -> State:
    failure = _root_failure(facts)
    condition = facts.conditions.get("Failed") or {}
    said = " ".join(str(condition.get("message", "")).split())
    if failure is None or (failure.kind == "signal" and "deadline" in said):
        if "deadline" in said or condition.get("reason") == "DeadlineExceeded":
            failure = Failure("deadline", 0, pod_name=f"job {base.name}")
            code = ExitCode.TIMEOUT
        else:
            # Refused by the operator, or its pods are gone without a trace: nothing points to the user's code.
            refused = "Validation" in str(condition.get("reason", ""))
            code = ExitCode.USAGE if refused else ExitCode.INFRASTRUCTURE
    else:
        code = failure.code
        if failure.kind == "exit" and failure.exit_code in _FINAL_CODES:
            code = ExitCode(failure.exit_code)  # a launcher's own code, whose words were lost
    return replace(
        base,
        phase=Phase.FAILED,
        code=int(code),
        reason=_word(failure) or str(condition.get("reason", "")),
        message=failure.summary if failure else said,
        failure=failure,
        ended=facts.ended or timestamp(condition.get("lastTransitionTime")) or None,
    )


def _root_failure(facts: _Facts) -> Failure | None:
    """What led to all else: a launcher's record before what the containers show, never a peer's broken connection."""
    told = [v.failure for v in facts.verdicts if v.outcome == "failed" and v.failure]
    ends = [failure for pod in facts.pods if pod.final and not pod.record and (failure := pod.failure())]
    # A launcher that lost the others knows only that they were lost; one of them may know why.
    found = min([*told, *ends], key=lambda f: (f.secondary, f.kind == "lost", f not in told, f.time), default=None)
    return _with_memory(found or _failure_in_events(facts), facts)


def _with_memory(failure: Failure | None, facts: _Facts) -> Failure | None:
    """The failure, and that it was the memory limit, where the launcher itself was killed and could not say so."""
    if failure is None:
        return None
    name = failure.pod_name or next((pod.name for pod in facts.pods if pod.index == failure.pod), "")
    since = next((a.started for v in facts.verdicts for a in v.attempts if a.number == failure.attempt), 0.0)
    if failure.kind in ("lost", "signal") and facts.killed_by_memory(name, since):
        failure = replace(failure, kind="oom", pod_name=name, message="")
    if failure.kind == "oom" and not failure.message:
        limit = facts.memory_limit(name)
        told = f"the limit is {limit}; a larger --memory helps" if limit else "a larger --memory helps"
        return replace(failure, message=told)
    return failure


def _failure_in_events(facts: _Facts) -> Failure | None:
    """How a pod ended that is gone: the operator's events outlive it."""
    for event in facts.of_job:
        match = _CONTAINER_ENDED.match(str(event.get("message", "")))
        if match and event.get("reason") in ("Error", "OOMKilled"):
            name, code, said = match[1], int(match[2]), match[3].strip()
            index = next((pod.index for pod in facts.pods if pod.name == name), 0)
            kind = "oom" if event["reason"] == "OOMKilled" else "exit"
            last = said.splitlines()[-1] if said and not said.startswith("{") else ""
            when = timestamp(event.get("lastTimestamp"))
            return Failure(kind, index, pod_name=name, time=when, message=last, exit_code=code)
    return None


def _word(failure: Failure | None) -> str:
    if failure is None:
        return ""
    words = {
        "exception": failure.type,
        "exit": "ExitCode",
        "signal": "Signal",
        "oom": "OutOfMemory",
        "lost": "PodLost",
        "deadline": "Deadline",
        "usage": "Usage",
    }
    return words.get(failure.kind, failure.kind)


def _unfinished(base: State, facts: _Facts, now: float) -> State:
    if facts.job["metadata"].get("deletionTimestamp"):
        return replace(base, phase=Phase.STOPPING, reason="Deleted", message="it is being deleted")
    if facts.policy.get("suspend"):
        queue = (facts.job["metadata"].get("labels") or {}).get(labels.QUEUE)
        why = f"it waits in queue {queue}" if queue else "it is suspended"
        return replace(base, phase=Phase.QUEUED, reason="Suspended", message=why)
    if not facts.known and all(pod.phase == podstate.MISSING for pod in facts.pods):
        silent = now - base.created
        if silent < SILENCE:
            return base
        why = f"the training operator has not touched it for {short_duration(silent)}; does it run in this cluster?"
        return replace(base, reason="NoOperator", message=why)
    if base.ready == base.replicas:
        last = facts.record.attempts[-1] if facts.record and facts.record.attempts else None
        over = last is not None and last.failure is not None
        return replace(base, phase=Phase.RESTARTING if over else Phase.RUNNING)
    reason, message = _obstacle(facts)
    unplaced = any(pod.stuck or pod.phase in (podstate.MISSING, podstate.PENDING) for pod in facts.pods)
    phase = Phase.RESTARTING if facts.began else Phase.PENDING if unplaced else Phase.STARTING
    return replace(base, phase=phase, reason=reason, message=message)


def _obstacle(facts: _Facts) -> tuple[str, str]:
    """What keeps pods from running: the reason that most of them have."""
    stuck = [pod for pod in facts.pods if pod.stuck or pod.phase == podstate.UNKNOWN]
    if not stuck:
        return "", ""
    reasons = [pod.reason for pod in stuck]
    reason = max(reasons, key=reasons.count)
    pods = [pod for pod in stuck if pod.reason == reason]
    others = f" and {len(pods) - 1} other pods" if len(pods) > 2 else " and one other pod" if len(pods) == 2 else ""
    return reason, f"{pods[0].name}{others}: {pods[0].message or 'Kubernetes gives no details'}"


def _attempts(facts: _Facts, state: State) -> list[AttemptState]:
    if facts.record is None:
        return []
    attempts = []
    for attempt in facts.record.attempts:
        failure = _with_memory(attempt.failure, facts)
        last = attempt is facts.record.attempts[-1]
        if failure is None and last and state.phase == Phase.FAILED:
            failure = state.failure
        if failure is not None:
            outcome = "failed"
        else:
            outcome = "succeeded" if last and state.phase == Phase.SUCCEEDED else "running"
        ended = attempt.ended if attempt.ended or not (last and state.final) else state.ended
        cause = failure.summary if failure else ""
        attempts.append(AttemptState(attempt.number + 1, attempt.started, ended, outcome, cause, failure))
    return attempts


def job_of(pod: Object) -> str:
    """Name of the job that a pod belongs to."""
    return str((pod["metadata"].get("labels") or {}).get(labels.OPERATOR_JOB_NAME, ""))
