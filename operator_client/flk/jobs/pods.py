"""What is true of one pod: its phase in flk's words, why it is not running, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flk.kube.resources import Object
from flk.units import timestamp
from flk_runtime.contract import CONTAINER, Failure, JobRecord

MISSING, PENDING, STARTING, RUNNING = "Missing", "Pending", "Starting", "Running"
STOPPING, SUCCEEDED, FAILED, UNKNOWN = "Stopping", "Succeeded", "Failed", "Unknown"

_NORMAL: Final = frozenset({"ContainerCreating", "PodInitializing"})  # reasons to wait that need no telling
_FIRST_SIGNAL: Final = 128  # exit codes above it are 128 + the signal


@dataclass(frozen=True)
class PodState:
    """One pod of a job, there or not."""

    index: int  # position in the job
    name: str
    ranks: list[int]
    phase: str = MISSING
    node: str = ""
    reason: str = ""  # one word, as Kubernetes has it: ImagePullBackOff, Unschedulable, OOMKilled
    message: str = ""
    restarts: int = 0  # of its container; a pod that was made anew starts from 0
    started: float | None = None  # seconds since the epoch
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    memory_limit: str = ""
    final: bool = field(default=False, repr=False)  # it ended badly and is not started again
    record: JobRecord | None = field(default=None, repr=False)

    @property
    def stuck(self) -> bool:
        """Whether something has to change before it can run."""
        return bool(self.reason) and self.phase in (PENDING, STARTING, MISSING)

    def failure(self) -> Failure | None:
        """How it ended, where no launcher has said so itself."""
        if self.phase != FAILED:
            return None
        if self.reason == "OOMKilled":
            kind = "oom"
        elif self.exit_code is None:
            kind = "lost"  # evicted, or its node is gone
        else:
            kind = "signal" if self.signal else "exit"
        last = self.message.strip().splitlines()[-1] if self.message.strip() else ""
        if kind == "lost":
            last = ": ".join(filter(None, ["was lost", self.reason, last]))
        return Failure(
            kind,
            self.index,
            self.ranks[0] if len(self.ranks) == 1 else None,
            self.name,
            self.node,
            time=self.ended or 0.0,
            message=last,
            traceback=self.message if "\n" in self.message.strip() else "",
            exit_code=self.exit_code,
            signal=self.signal,
        )


def missing(index: int, name: str, ranks: list[int], events: Sequence[Object]) -> PodState:
    """A pod that is not there; ``events`` of its job may say why."""
    for event in reversed(events):
        if str(event.get("reason", "")).startswith("FailedCreate") and name in str(event.get("message", "")):
            return PodState(index, name, ranks, reason=event["reason"], message=_one_line(event.get("message")))
    return PodState(index, name, ranks)


def of(pod: Object, index: int, ranks: list[int], *, restart: str = "", events: Sequence[Object] = ()) -> PodState:
    """The state of a pod. ``restart`` is the job's restart policy, ``events`` are those about this pod."""
    status = pod.get("status") or {}
    container = _container(status.get("containerStatuses"))
    state = container.get("state") or {}
    ended = state.get("terminated") or {}
    code = ended.get("exitCode")
    record = JobRecord.from_json(str(ended.get("message"))) if ended.get("message") else None
    phase = _phase(pod, state)
    reason, message = _why(status, phase, state, events)
    return PodState(
        index=index,
        name=pod["metadata"]["name"],
        ranks=ranks,
        phase=phase,
        node=str((pod.get("spec") or {}).get("nodeName") or ""),
        reason=reason,
        message=message,
        restarts=int(container.get("restartCount") or 0),
        started=_time((state.get("running") or ended).get("startedAt")),
        ended=_time(ended.get("finishedAt")),
        exit_code=code,
        signal=_signal(ended),
        memory_limit=memory_limit(pod),
        # The operator starts a pod anew when its code says that it may have been the machine's fault, or there is none.
        final=phase == FAILED and not (restart == "ExitCode" and (code is None or code >= _FIRST_SIGNAL)),
        record=record,
    )


def was_killed_by_memory(pod: Object) -> bool:
    """Whether the container, not just a process in it, was killed at its memory limit."""
    container = _container((pod.get("status") or {}).get("containerStatuses"))
    ends = [(container.get(which) or {}).get("terminated") or {} for which in ("state", "lastState")]
    return any(end.get("reason") == "OOMKilled" for end in ends)


def memory_limit(pod: Object) -> str:
    """The memory limit of the training container, as it was written; empty if it has none."""
    containers = [c for c in (pod.get("spec") or {}).get("containers") or [] if c.get("name") == CONTAINER]
    limits = (containers[0].get("resources") or {}).get("limits") or {} if containers else {}
    return str(limits.get("memory") or "")


def _container(statuses: Any) -> Object:
    found = [status for status in statuses or [] if status.get("name") == CONTAINER]
    return dict(found[0]) if found else {}


def _phase(pod: Object, state: Object) -> str:
    phase = str((pod.get("status") or {}).get("phase") or PENDING)
    if phase in (SUCCEEDED, FAILED):
        return phase
    if pod["metadata"].get("deletionTimestamp"):
        return STOPPING
    if phase == PENDING:
        return STARTING if (pod.get("spec") or {}).get("nodeName") else PENDING
    if phase == RUNNING:
        return RUNNING if "running" in state or not state else STARTING
    return UNKNOWN


def _why(status: Object, phase: str, state: Object, events: Sequence[Object]) -> tuple[str, str]:
    """Reason and message: why it is not running, or how it ended."""
    conditions = {c.get("type"): c for c in status.get("conditions") or []}
    if phase == FAILED:
        ended = state.get("terminated") or {}
        evicted = conditions.get("DisruptionTarget") or {}
        if status.get("reason") and not ended:
            return str(status["reason"]), _one_line(status.get("message"))
        if evicted.get("status") == "True" and ended.get("reason") != "OOMKilled":
            return str(evicted.get("reason")), _one_line(evicted.get("message"))
        said = "" if JobRecord.from_json(str(ended.get("message"))) else str(ended.get("message") or "")
        return str(ended.get("reason") or status.get("reason") or "Error"), said
    if phase == PENDING:
        scheduled = conditions.get("PodScheduled") or {}
        if scheduled.get("status") == "False":
            return str(scheduled.get("reason") or "Unschedulable"), _one_line(scheduled.get("message"))
    if phase == STARTING:
        for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") and waiting["reason"] not in _NORMAL:
                return str(waiting["reason"]), _one_line(waiting.get("message"))
        warnings = [event for event in events if event.get("type") == "Warning"]
        if warnings:
            return str(warnings[-1].get("reason")), _one_line(warnings[-1].get("message"))
    if phase == UNKNOWN:
        return str(status.get("reason") or "Unknown"), _one_line(status.get("message") or "its node does not answer")
    return "", ""


def _signal(ended: Object) -> int | None:
    if ended.get("signal"):
        return int(ended["signal"])
    code = ended.get("exitCode")
    return code - _FIRST_SIGNAL if code is not None and _FIRST_SIGNAL < code < 2 * _FIRST_SIGNAL else None


def _time(text: Any) -> float | None:
    return timestamp(text) or None


def _one_line(text: Any) -> str:
    return " ".join(str(text or "").split())
