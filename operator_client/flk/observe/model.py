"""PodPhase, PodState, Evidence and Finding: the pods of a job and the findings about them, as plain data."""

from __future__ import annotations

from flk_runtime.contract.failure import Failure, Kind, kind_of_container
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.values import StrEnum, dataclass, field


class PodPhase(StrEnum):
    """Where a pod is in its life."""

    MISSING = "Missing"  # it should exist and does not
    SUSPENDED = "Suspended"  # it does not exist while the job is suspended or waits for its queue
    PENDING = "Pending"  # it has no node
    STARTING = "Starting"  # it has a node; its container does not run yet, or not any more
    RUNNING = "Running"
    TERMINATING = "Terminating"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"  # its node does not answer


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
    def absent(self) -> bool:
        """Whether it does not exist."""
        return self.phase in (PodPhase.MISSING, PodPhase.SUSPENDED)

    @property
    def is_up(self) -> bool:
        """Whether it runs or has succeeded."""
        return self.phase in (PodPhase.RUNNING, PodPhase.SUCCEEDED)

    @property
    def stuck(self) -> bool:
        """Whether it cannot run before something changes."""
        return bool(self.reason) and self.phase in (PodPhase.PENDING, PodPhase.STARTING, PodPhase.MISSING)

    @property
    def failure(self) -> Failure | None:
        """The failure that its container shows, for pods whose launcher has left no record."""
        if self.phase != PodPhase.FAILED:
            return None
        kind = kind_of_container(self.reason, self.exit_code, self.signal)
        last_line = self.message.strip().splitlines()[-1] if self.message.strip() else ""
        if kind is Kind.LOST:
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
class Evidence:
    """One fact that supports a finding, and where it was read."""

    source: str  # the object or the log: "pod train-worker-1", "event of PyTorchJob train", "log of rank 2"
    text: str
    field: str = ""  # path in the object: status.containerStatuses[pytorch].state.waiting
    time: float = 0.0  # seconds since the epoch by the clock of the cluster; 0 if the source has no time

    @property
    def where(self) -> str:
        """The source and the field in one text."""
        return f"{self.source}: {self.field}" if self.field else self.source


@dataclass(frozen=True)
class Finding:
    """A cause that was found in the objects of a job: a row of the table of causes with this job's values."""

    code: str  # stable, upper camel case: ImageNotFound; `flk explain CODE` prints its page
    sentence: str  # the cause, in one sentence without its full stop
    remedy: str  # a command or, where no command helps, an instruction
    evidence: list[Evidence] = field(default_factory=list)
    pods: list[str] = field(default_factory=list)  # names of the pods that it concerns; empty for the whole job
    since: float = 0.0  # seconds since the epoch: when it was first seen in the objects
    resolves_itself: bool = False  # it may go away without a change: capacity, a queue, a restart
    grace: float = 0.0  # seconds after ``since`` in which the job does not count as stuck
    exit_code: int = 0  # of `flk wait`, when the job is stuck or has failed because of it
    stuck_after: float | None = None  # seconds after ``since`` at which the job is stuck, whatever may cure the cause

    def is_stuck(self, now: float) -> bool:
        """Return whether a job with this cause cannot go on: it does not resolve by itself, and the grace is over."""
        if self.stuck_after is not None:
            return now - self.since >= self.stuck_after
        return not self.resolves_itself and now - self.since >= self.grace
