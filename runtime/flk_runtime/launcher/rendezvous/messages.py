"""Messages of the rendezvous: the events for a launcher's own loop, and what launchers write into the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from flk_runtime.contract import Attempt, Failure, JobRecord

LEADER_KEY = "leader"
ROUND_KEY = "round"
LEFT_KEY = "left"


def join_key(round_number: int, pod: int) -> str:
    """Key of the `Join` of a pod."""
    return f"{round_number}/join/{pod}"


def start_key(round_number: int) -> str:
    """Key of what `encode_start` returns."""
    return f"{round_number}/start"


def done_key(round_number: int) -> str:
    """Key of the number of pods whose ranks have all succeeded."""
    return f"{round_number}/done"


def pod_done_key(round_number: int, pod: int) -> str:
    """Key that counts how often a pod has reported success, so that it counts once."""
    return f"{round_number}/done/{pod}"


def primary_key(round_number: int) -> str:
    """Key that is set when a launcher knows a failure of the attempt that is not secondary."""
    return f"{round_number}/primary"


def end_key(round_number: int) -> str:
    """Key of what `encode_end` returns."""
    return f"{round_number}/end"


@dataclass(frozen=True)
class AttemptStarted:
    """An attempt starts: start the ranks."""

    round: int
    number: int
    master_address: str  # MASTER_ADDR
    master_port: int  # MASTER_PORT
    history: list[Attempt]  # the latest attempts, this one included


@dataclass(frozen=True)
class AttemptEnded:
    """The attempt is over in every pod, with a failure, or with success (None)."""

    round: int
    failure: Failure | None


@dataclass(frozen=True)
class JobEnded:
    """No further attempt follows."""

    record: JobRecord


@dataclass(frozen=True)
class LeaderLost:
    """The connection to the leader broke: end the ranks. The member connects again."""

    failure: Failure


@dataclass(frozen=True)
class ThreadFailed:
    """A thread of the rendezvous ended with an exception, which is a bug in flk."""

    error: BaseException


Event = AttemptStarted | AttemptEnded | JobEnded | LeaderLost | ThreadFailed


@dataclass(frozen=True)
class Join:
    """A member's message to the leader: it has joined the round."""

    incarnation: str  # identifies the launcher's process: another one for the same pod means that the pod was restarted
    pod_name: str
    node: str
    history: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)  # of this pod's ranks in the last attempt

    def to_json(self) -> str:
        """The message as stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Join:
        """The message from the store."""
        data = json.loads(text)
        return cls(
            data["incarnation"],
            data["pod_name"],
            data["node"],
            [Attempt.from_dict(attempt) for attempt in data["history"]],
            [Failure.from_dict(failure) for failure in data["failures"]],
        )


def encode_start(event: AttemptStarted | JobEnded) -> str:
    """The leader's decision after all members have joined, as stored: an attempt, or the end of the job."""
    return json.dumps(asdict(event))


def decode_start(text: bytes) -> AttemptStarted | JobEnded:
    """The leader's decision from the store."""
    data = json.loads(text)
    if "record" in data:
        return JobEnded(JobRecord.from_dict(data["record"]))
    return AttemptStarted(**data | {"history": [Attempt.from_dict(attempt) for attempt in data["history"]]})


def encode_end(failure: Failure | None) -> str:
    """How the attempt ended, as stored: a failure, or success (None)."""
    return json.dumps({"failure": asdict(failure) if failure else None})


def decode_end(text: bytes) -> Failure | None:
    """How the attempt ended, from the store."""
    failure = json.loads(text)["failure"]
    return Failure.from_dict(failure) if failure else None
