"""Messages that launchers send each other in the rendezvous, and events for a launcher's own loop."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from flk_runtime.contract.failure import BEFORE_FIRST, Failure
from flk_runtime.contract.quantities import parse_ranges
from flk_runtime.contract.record import Attempt, JobRecord, SlowRank, Standstill
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.control import ThreadFailed
from flk_runtime.launcher.hangs.snapshot import Snapshot
from flk_runtime.launcher.preemption import Boundary
from flk_runtime.launcher.replication.plan import CheckpointId, Inventory, MemoryPlan
from flk_runtime.wire import Refused, Registry

DISCONNECTED: Final = "lost the connection to pod 0"  # what a pod did whose connection to the leader broke


class FromMember:
    """The base class of messages from a member to the leader."""


class FromLeader:
    """The base class of messages from the leader to a member. `MemoryPlan` and `Refused` come from it too."""


# From a member to the leader -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(FromMember):
    """First message of a connection: which launcher connects."""

    pod: int
    incarnation: str  # identifies the launcher's process: another one for the same pod means that the pod was restarted
    age: float  # seconds since that process began, since clocks of nodes differ


@dataclass(frozen=True)
class Join(FromMember):
    """The member is ready for the next attempt: no rank of the last attempt runs any more."""

    pod_name: str
    node: str
    history: list[Attempt] = field(default_factory=list)  # empty if the leader knows it
    failures: list[Failure] = field(default_factory=list)  # of this pod in the last attempt; BEFORE_FIRST: in none
    memory: Inventory | None = None  # checkpoints in memory that the pod holds; None: it keeps none
    step: int | None = None  # optimizer steps that the ranks of this pod had done at its end; None: they do not tell
    again: bool = False  # the job has had attempts, which may no longer count: it was suspended

    @property
    def fault(self) -> Failure | None:
        """The fault of its node that the launcher has found before its first attempt; None: there is none."""
        return next((failure for failure in self.failures if failure.attempt == BEFORE_FIRST), None)


@dataclass(frozen=True)
class FailureReport(FromMember):
    """A rank of this pod failed, or the pod or the job cannot go on: end the attempt in all pods."""

    attempt: int
    failure: Failure


@dataclass(frozen=True)
class SuccessReport(FromMember):
    """All ranks of this pod ended with success; ``grouped`` is False if none of them had opened a process group."""

    attempt: int
    grouped: bool = True


@dataclass(frozen=True)
class PreemptionRequest(FromMember):
    """This pod has to stop, as ``failure`` says: have all ranks save and end."""

    attempt: int
    failure: Failure


@dataclass(frozen=True)
class BoundaryReport(FromMember):
    """The boundaries that the ranks of this pod have reached. Follows `PreemptionStarted`."""

    attempt: int
    boundaries: list[Boundary]


@dataclass(frozen=True)
class RanksEnded(FromMember):
    """All ranks of this pod have ended in a preemption, after ``saved`` if they have saved after that step."""

    attempt: int
    saved: int | None


@dataclass(frozen=True)
class Restored(FromMember):
    """The ranks of this attempt have begun after ``step``, with the state that ``source`` names."""

    attempt: int
    step: int
    source: str


@dataclass(frozen=True)
class Unreadable(FromMember):
    """No pod could give a shard of this checkpoint, which is restored, to a rank of this pod."""

    attempt: int
    checkpoint: CheckpointId


@dataclass(frozen=True)
class Stopping(FromMember):
    """This launcher has to stop, and no rank of its pod runs."""


@dataclass(frozen=True)
class Leave(FromMember):
    """The member knows how the job ended."""


@dataclass(frozen=True)
class StacksReport(FromMember):
    """Stacks of all ranks of this pod, as the leader has asked for them."""

    number: int  # of the request
    snapshots: list[Snapshot]


class Topic(str, enum.Enum):
    """What a process of a pod may ask about the whole job."""

    STACKS = "stacks"  # of all ranks; the answer is that of flk_runtime.launcher.hangs.diagnosis.to_dict
    METRICS = "metrics"  # the answer is flk_runtime.contract.telemetry.Telemetry


@dataclass(frozen=True)
class Question(FromMember):
    """A process or a person asks about the whole job."""

    topic: Topic
    asker: str  # a name for `Reply`


# In both directions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat(FromMember, FromLeader):
    """The sender lives. A member sends it at intervals, and the leader answers it."""

    status: PodStatus | None = None  # of the member's ranks


# From the leader to a member -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(FromLeader):
    """Answer to `Hello`: the launcher is the member of its pod."""

    leader: str  # identifies the leader's process
    pod_name: str = ""  # of pod 0


@dataclass(frozen=True)
class AttemptStarted(FromLeader):
    """An attempt starts: start the ranks."""

    number: int
    master_address: str  # MASTER_ADDR
    master_port: int  # MASTER_PORT
    history: list[Attempt]  # the latest attempts, this one included
    order: str  # the pods that take part, in the order of their ranks, as ranges
    readers: list[int] = field(default_factory=list)
    """The rank that reads each shard of the checkpoint in memory; empty: the rank that wrote it."""
    memory: MemoryPlan | None = None
    """None: no checkpoints are kept in memory. It travels before this message, which is the same for all pods."""
    again: bool = False  # it is not the first one of the job

    @property
    def pods(self) -> list[int]:
        """The pods that take part, in the order of their ranks."""
        return parse_ranges(self.order)

    def ranks(self, pod: int, processes: int) -> range:
        """The ranks of a pod that takes part; each pod has ``processes`` ranks."""
        first = self.pods.index(pod) * processes
        return range(first, first + processes)


@dataclass(frozen=True)
class PreemptionStarted(FromLeader):
    """The ranks have to save and end, as ``failure`` says: hold them at their next step boundary.

    A leader sends it again, with ``urgent``, when a pod has to stop after ranks were held for another reason: ranks
    that cannot save together any more must not wait for each other.
    """

    attempt: int
    failure: Failure
    urgent: bool = True  # a pod has to stop, so the ranks have no longer than the grace period


@dataclass(frozen=True)
class SaveAt(FromLeader):
    """Have all ranks save and end after ``step``; NO_STEP: send them SIGTERM."""

    attempt: int
    step: int


@dataclass(frozen=True)
class AttemptEnded(FromLeader):
    """The attempt is over in every pod: end the ranks."""

    number: int
    failure: Failure  # the first that the leader heard of; the cause is chosen when all members have joined again


@dataclass(frozen=True)
class JobEnded(FromLeader):
    """No further attempt follows."""

    record: JobRecord


@dataclass(frozen=True)
class StacksRequested(FromLeader):
    """Take the stacks of this pod's ranks and send them."""

    number: int


@dataclass(frozen=True)
class Reply(FromLeader):
    """The answer for the asker that `Question` named."""

    asker: str
    content: dict[str, Any]


@dataclass(frozen=True)
class WaitsChanged(FromLeader):
    """Other ranks are waited for than before. For the launcher of pod 0, which writes the job's record."""

    slow: list[SlowRank]
    standstill: Standstill | None = None


# From the threads of the rendezvous to the launcher's loop, in the same process -----------------------------------


@dataclass(frozen=True)
class LeaderLost:
    """The connection to the leader broke: end the ranks. The member connects again."""

    failure: Failure


Message = FromMember | FromLeader | MemoryPlan | Refused
Event = FromLeader | MemoryPlan | Refused | LeaderLost | ThreadFailed
Send = Callable[[Collection[int], Message], None]
"""A function that sends a message to pods, if they are connected."""
MESSAGES: Final[Registry[Message]] = Registry(
    [*FromMember.__subclasses__(), *FromLeader.__subclasses__(), MemoryPlan, Refused]
)
