"""State, PodState and AttemptState: what flk reports about a job, as plain data."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from flk_runtime.contract import Failure, JobRecord

SCHEMA: Final = "flk.dev/state/v1"  # of the JSON that `-o json` prints


class Phase(str, enum.Enum):
    """Where a job is in its life."""

    PENDING = "Pending"  # something is missing: a node, an image, quota, the operator
    SUSPENDED = "Suspended"  # by its user, or until a queue admits it
    STARTING = "Starting"  # all pods have a node; their containers start
    RUNNING = "Running"
    RESTARTING = "Restarting"  # an attempt has ended and the next one has not begun
    TERMINATING = "Terminating"  # it is being deleted
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"

    def __str__(self) -> str:
        return self.value


class PodPhase(str, enum.Enum):
    """Where a pod is in its life."""

    MISSING = "Missing"  # it should exist and does not
    PENDING = "Pending"  # it has no node
    STARTING = "Starting"  # it has a node; its container does not run yet, or not any more
    RUNNING = "Running"
    TERMINATING = "Terminating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"  # its node does not answer

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PodState:
    """One pod of a job, whether it exists or not. Times are in seconds since the epoch."""

    index: int  # position in the job
    name: str
    ranks: list[int]
    phase: PodPhase = PodPhase.MISSING
    node: str = ""
    reason: str = ""  # one word, as Kubernetes writes it: ImagePullBackOff, Unschedulable, OOMKilled
    message: str = ""
    restarts: int = 0  # of its container; a recreated pod begins at 0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    memory_limit: str = ""
    failed_permanently: bool = field(default=False, repr=False)  # it failed, and the operator will not recreate it
    record: JobRecord | None = field(default=None, repr=False)

    @property
    def stuck(self) -> bool:
        """Whether it cannot run before something changes."""
        return bool(self.reason) and self.phase in (PodPhase.PENDING, PodPhase.STARTING, PodPhase.MISSING)

    @property
    def failure(self) -> Failure | None:
        """The failure that its container shows, for pods whose launcher has left no record."""
        if self.phase != PodPhase.FAILED:
            return None
        if self.reason == "OOMKilled":
            kind = "oom"
        elif self.exit_code is None:
            kind = "lost"  # evicted, or its node is gone
        else:
            kind = "signal" if self.signal else "exit"
        last_line = self.message.strip().splitlines()[-1] if self.message.strip() else ""
        if kind == "lost":
            last_line = ": ".join(filter(None, ["was lost", self.reason, last_line]))
        return Failure(
            kind,
            self.index,
            self.ranks[0] if len(self.ranks) == 1 else None,
            self.name,
            self.node,
            time=self.ended or 0.0,
            message=last_line,
            traceback=self.message if "\n" in self.message.strip() else "",
            exit_code=self.exit_code,
            signal=self.signal,
        )


@dataclass(frozen=True)
class AttemptState:
    """One start of all ranks together, numbered from 1. Times are in seconds since the epoch."""

    number: int
    started: float
    ended: float | None
    outcome: str  # running, succeeded, failed
    cause: str = ""  # one line
    failure: Failure | None = None


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
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    replicas: int = 0
    processes: int = 1  # ranks in each pod
    ready: int = 0  # pods that run or have succeeded
    restarts: int = 0  # attempts after the first
    max_restarts: int | None = None
    owner: str = ""
    image: str = ""
    code_hash: str = ""
    failure: Failure | None = None
    attempts: list[AttemptState] = field(default_factory=list)
    pods: list[PodState] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the job has ended, well or badly, or was deleted."""
        return self.phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.DELETED)

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.replicas * self.processes

    @property
    def headline(self) -> str:
        """The phase and its reason, in one line."""
        why = f"{self.reason}: {self.message}" if self.reason and self.message else self.reason or self.message
        return f"{self.phase.value.lower()}: {why}" if why else self.phase.value.lower()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `-o json`, with the version of its schema."""
        data = {"schema": SCHEMA, **asdict(self), "phase": self.phase.value, "world_size": self.world_size}
        for pod in data["pods"]:
            del pod["record"], pod["failed_permanently"]
            pod["phase"] = pod["phase"].value
        data["failure"] = self.failure and {**asdict(self.failure), "summary": self.failure.summary}
        return data
