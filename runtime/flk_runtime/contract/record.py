"""Records: data of the launchers about a job, its attempts and the ranks that the others wait for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from flk_runtime.contract import foreign
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.foreign import AtMost, Count, Pods, Processes, Seconds, Time
from flk_runtime.contract.quantities import parse_ranges
from flk_runtime.contract.values import asdict, dataclass, field, replace

_KEPT_RECORD_LIMIT = 10_000  # bytes
_FEW: Final = AtMost(1_000)  # a reader may make a row for each
# Where the ranks of an attempt got their state, by the number in the progress page; empty: the script says nothing.
SOURCES: Final = ("", "start", "memory", "storage")


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of the job."""

    number: Count
    started: Time  # seconds since the epoch, as `ended`
    ended: Time | None = None
    failure: Failure | None = None  # None while the attempt runs, and when it succeeded
    restarts: Count = 0  # that the job had used when this attempt started
    disruptions: Count = 0
    step: int | None = None  # most steps that a rank has completed; None: unknown
    pods: Annotated[str, parse_ranges] = ""
    """That took part, in the order of their ranks, as `ranges.format_ranges` writes them; empty: unknown."""
    restored: int | None = None  # the step after which its ranks began; None: unknown
    restored_from: str = ""  # one of SOURCES


@dataclass(frozen=True)
class SlowRank:
    """A rank that works longer in each step than the others, which wait for it."""

    rank: int
    pod_name: str
    node: str
    factor: float  # its work in a step, divided by the work of the median rank
    data_wait: float | None = None  # share of the time in which it waits for data, if it waits longer than the others

    @property
    def summary(self) -> str:
        """One line that names the rank and its node."""
        place = f"{self.pod_name} on {self.node}" if self.node else self.pod_name
        data = "" if self.data_wait is None else f", and waits for its data {self.data_wait:.0%} of the time"
        return f"rank {self.rank} in {place} is slow: it works {self.factor:g} times as long as the others{data}"


@dataclass(frozen=True)
class QuarantinedNode:
    """A node that pods of a job avoid for a while: they have failed there repeatedly, or it is unhealthy."""

    node: str
    reason: str = ""  # the latest failure there, in one line
    until: Time = 0.0  # when it is forgotten, in seconds since the epoch; 0: never, or unknown


# What the time of a job goes into, in the order in which it is shown. The causes add up to the time since the start.
TIME_CAUSES: Final = (
    "computing",  # steps whose result was kept, without the first one of each attempt
    "waiting",  # for pods, before the first attempt
    "starting",  # from the start of an attempt until its ranks have done their first step
    "restoring",  # a checkpoint
    "saving",  # checkpoints, as far as the training stops for it
    "lost",  # steps that a later attempt had to do again
    "hanging",  # from the last step until a hang was found
    "recovering",  # from the end of an attempt until the next one starts
    "down",  # no launcher of pod 0 ran: the job was suspended, or the pod was lost
)


@dataclass(frozen=True)
class Goodput:
    """What the time of a job went into until a moment."""

    until: Time  # seconds since the epoch, by the clock of pod 0's node
    seconds: dict[str, Seconds]  # by TIME_CAUSES; a cause without time is left out
    first_step: int | None = None  # the first that is counted; None: the script tells no steps
    step: int | None = None  # the last one

    @property
    def total(self) -> float:
        """Seconds since the start of the job's first launcher."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """The goodput: the time of steps whose result was kept, as a share of all time; None: unknown."""
        return self.seconds.get("computing", 0.0) / self.total if self.total and self.step is not None else None

    def hanging_since(self, since: float) -> Goodput:
        """These times while no rank has made progress since a moment: its computing is a hang, as far as is known."""
        moved = min(self.seconds.get("computing", 0.0), max(0.0, round(self.until - since, 3)))
        computing, hanging = (self.seconds.get(cause, 0.0) for cause in ("computing", "hanging"))
        return replace(self, seconds={**self.seconds, "computing": computing - moved, "hanging": hanging + moved})


@dataclass(frozen=True)
class Standstill:
    """A time in which no rank of a job that runs makes progress. It ends nothing yet."""

    since: Time  # when a rank last made progress; seconds since the epoch
    text: str  # which ranks wait for which, and what these do
    pod_name: str  # of the first rank that the others wait for

    @property
    def summary(self) -> str:
        """One line that names the ranks."""
        return f"no rank makes progress: {self.text}"


@dataclass(frozen=True)
class JobRecord:
    """State of a job as its launchers know it: a line of the log while it runs, the termination message at its end."""

    outcome: (
        str  # running, succeeded, failed, preempted, replaced: the job goes on with another pod in place of this one
    )
    code: int  # exit code of the launcher
    max_restarts: Count = 0  # how many the job may use
    failure: Failure | None = None
    attempts: Annotated[list[Attempt], _FEW] = field(default_factory=list)
    max_disruptions: Count = 0
    restarts: Count = 0  # used: attempts that followed failures of the training code
    disruptions: Count = 0  # used: attempts that followed disruptions
    no_retry_reason: str = ""  # why no attempt follows a failure
    slow: Annotated[list[SlowRank], _FEW] = field(default_factory=list)  # that others wait for, while the job runs
    standstill: Standstill | None = None  # while the job runs; None: a rank makes progress
    started: Time = 0.0  # when the job's first launcher started, as far as is known; seconds since the epoch; 0: not
    quarantine: Annotated[list[QuarantinedNode], _FEW] = field(default_factory=list)
    goodput: Goodput | None = None  # only the launcher of pod 0 knows it
    saved: int | None = None  # step of the newest checkpoint that it knows of, in memory or in storage
    stored: int | None = None  # of the newest one in storage
    alone: int = 0  # ranks of a job that has succeeded, if there were several and none opened a process group

    @property
    def warning(self) -> str:
        """What is probably wrong with a success, in one line; empty: nothing."""
        if not self.alone:
            return ""
        return (
            f"{self.alone} ranks ended and none opened a process group: each ran by itself; "
            "a script joins them by flk.init or torch.distributed.init_process_group"
        )

    def to_json(self, limit: int | None = None) -> str:
        """The record as one line of JSON of at most ``limit`` bytes.

        A longer one is shortened: first the tracebacks of the attempts are dropped, then the failure's stderr,
        traceback and message are cut, then the oldest attempts are dropped, then the failure's texts are cut further.
        """
        data = asdict(self)
        for name in ("standstill", "started", "quarantine", "goodput", "saved", "stored", "alone"):
            if not data[name]:
                del data[name]
        text = _dump(data)
        if limit is None or len(text.encode()) <= limit:
            return text
        for attempt in data["attempts"]:
            if attempt["failure"]:
                attempt["failure"]["traceback"] = attempt["failure"]["stderr"] = ""
                attempt["failure"]["message"] = attempt["failure"]["message"][:200]
        _shorten_failure(data, limit, least=800)
        while len(_dump(data).encode()) > limit and data["attempts"]:
            del data["attempts"][0]
        _shorten_failure(data, limit, least=0)
        return _dump(data)

    @classmethod
    def from_json(cls, text: str) -> JobRecord | None:
        """The record that ``text`` contains, or None if it contains none (another program's message, a cut line)."""
        try:
            return foreign.load(cls, text)
        except foreign.ForeignError:
            return None


def entry_key(job: str, uid: str) -> str:
    """The key of a job's entry of RECORDS."""
    return f"{job}.{uid}" if uid else job


@dataclass(frozen=True)
class ArchivedRecord:
    """The entry of a job in RECORDS: the launcher of pod 0 keeps it for when the pods are gone."""

    job: str
    uid: str  # of the job; empty: not known
    pods: Pods
    processes: Processes  # ranks in each pod
    created: Time  # when the job's first launcher of pod 0 started; seconds since the epoch, as `updated`
    updated: Time
    record: JobRecord
    step: int | None = None  # optimizer steps that the first rank of pod 0 has done; None: unknown
    step_seconds: Seconds | None = None  # mean duration of its steps
    lines: Annotated[list[str], _FEW] = field(default_factory=list)  # the last ones of pod 0's log, with their prefixes
    telemetry: str = ""  # as flk_runtime.contract.telemetry packs it; empty: none is known
    start: Time = 0.0  # when the job was started or resumed, as its pods were told (FLK_STARTED); 0: they were not

    @property
    def key(self) -> str:
        """The key of the entry, which a later job of the same name does not have."""
        return entry_key(self.job, self.uid)

    def to_json(self) -> str:
        """The entry as one line of JSON of at most about 26 kB."""
        return _dump({**asdict(self), "record": json.loads(self.record.to_json(_KEPT_RECORD_LIMIT))})

    @classmethod
    def from_json(cls, text: str) -> ArchivedRecord | None:
        """The entry that ``text`` contains, or None if it contains none."""
        try:
            return foreign.load(cls, text)
        except foreign.ForeignError:
            return None


def _shorten_failure(data: dict[str, Any], limit: int, least: int) -> None:
    """Cut the texts of the failure of a record to ``least`` characters each, as far as the record exceeds ``limit``."""
    failure = data["failure"]
    for key in ("stderr", "traceback", "message") if failure else ():
        excess = len(_dump(data).encode()) - limit
        if excess > 0:
            # A character takes at least one byte of JSON, so dropping as many characters as bytes suffices.
            kept = max(least, len(failure[key]) - excess)
            failure[key] = failure[key][-kept:] if key != "message" and kept else failure[key][:kept]


def _dump(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
