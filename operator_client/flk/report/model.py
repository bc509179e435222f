"""Report: everything that a report about one job shows, as plain data. Nothing here asks a cluster or makes HTML."""

from __future__ import annotations

from flk.health import Diagnosis
from flk.jobs.state import State
from flk.observe.model import PodState
from flk_runtime.contract.telemetry import Telemetry
from flk_runtime.contract.values import dataclass, field


@dataclass(frozen=True)
class Submitted:
    """What was submitted, as far as the job's object tells. Values that may be secrets are ``***``."""

    command: str = ""
    commit: str = ""  # of git, in which the code was; with "-dirty" if files differed from it
    version: str = ""  # of the flk that submitted the job
    options: dict[str, str] = field(default_factory=dict)  # of flk.yaml, by their paths: resources.gpu
    variables: dict[str, str] = field(default_factory=dict)  # of the container's environment
    file: str = ""  # the options as flk.yaml


@dataclass(frozen=True)
class Moment:
    """Something that happened to the job."""

    time: float  # seconds since the epoch
    what: str  # attempt, end, hang, save, state, event
    text: str


@dataclass(frozen=True)
class Excerpt:
    """Lines of logs."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Report:
    """The report about one job. Times are in seconds since the epoch.

    ``missing`` says of sections without data why there is none: submitted, attempts, goodput, history, ranks,
    pods, usage or logs.
    """

    made: float
    version: str  # of the flk that made it
    seen: float  # when the job was seen last
    gone: bool  # the job does not exist any more: the launchers' record tells of it
    state: State
    answer: Diagnosis  # of `flk why`
    explanation: str  # the page of the cause, as `flk explain` prints it; empty without a cause
    submitted: Submitted
    moments: list[Moment]  # oldest first
    pods: list[PodState]
    telemetry: Telemetry | None
    excerpts: list[Excerpt]
    missing: dict[str, str]

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.state.name

    @property
    def duration(self) -> float | None:
        """Seconds from the start to the end, or until now; None before the start."""
        if not self.state.started:
            return None
        return (self.state.ended or self.seen) - self.state.started
