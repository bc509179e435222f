"""Phase, State, AttemptState and JobList: the state of jobs as flk reports it, as plain data."""

from __future__ import annotations

import enum
import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Final

from flk.observe.model import Finding, PodState
from flk.observe.progress import Progress
from flk.terminal import printable
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import Goodput, QuarantinedNode, SlowRank

SCHEMA: Final = "flk.dev/state/v1"  # of the JSON that `-o json` prints


class Phase(str, enum.Enum):
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

    def __str__(self) -> str:
        return self.value


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
    clocks: str = ""  # pods whose clocks differ much from pod 0's, and by how much
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

    def _repr_html_(self) -> str:
        """Return how a notebook shows the state."""
        from flk.jobs.state.model import pairs_table

        first = max(self.progress, key=lambda progress: progress.step, default=None)
        step = "" if first is None else f"{first.step:,}" + (f" of {first.total:,}" if first.total else "")
        return pairs_table(
            [
                ("job", f"{self.name} in namespace {self.namespace}"),
                ("phase", self.phase.value),
                ("reason", f"{self.reason}: {self.message}" if self.reason and self.message else self.message),
                ("pods", f"{self.ready} of {self.replicas} ready"),
                ("attempt", str(self.attempt) if self.attempts else ""),
                ("step", step),
                ("loss", "" if first is None or first.loss is None else f"{first.loss:.4g}"),
                ("created", _time(self.created)),
                ("ended", _time(self.ended)),
            ]
        )

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


class JobList(list[State]):
    """A list of states, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from flk.jobs.state.model import rows_table

        names = ("namespace", "name", "phase", "pods", "created", "owner", "reason")
        rows = [
            (s.namespace, s.name, s.phase.value, f"{s.ready}/{s.replicas}", _time(s.created), s.owner, s.reason)
            for s in self
        ]
        return rows_table(names, rows)


def _time(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC" if seconds else ""


def pairs_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table with a name and a text in each row; rows without a text are left out."""
    return _table([_head([name]) + _cells([text]) for name, text in rows if text])


def rows_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the names of its columns in the first row."""
    return _table([_head(names), *map(_cells, rows)])


def _table(rows: Sequence[str]) -> str:
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _head(names: Sequence[str]) -> str:
    return "".join(f"<th>{html.escape(name)}</th>" for name in names)


def _cells(texts: Sequence[str]) -> str:
    texts = [html.escape(printable(" ".join(text.split()))) for text in texts]
    return "".join(f'<td style="text-align: left">{text}</td>' for text in texts)
