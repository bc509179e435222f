"""Telemetry: the measurements of a job that its launchers keep, for `flk top`, `flk report` and the metrics page.

The launcher of pod 0 has the measurements of all pods. `python -m flk_runtime metrics`, in its container, prints them
as JSON, and the archived record of the job holds the last ones. All lists are bounded, whatever the job's size and
duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.typed import Time

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

HISTORY_LIMIT: Final = 500  # samples of a job's history; with more, neighbours are merged
RANKS_LIMIT: Final = 256  # ranks that are listed, the slowest first
PODS_LIMIT: Final = 256  # pods that are listed, those with the slowest ranks first
SAVES_LIMIT: Final = 64  # checkpoints that are listed: of more, only some of the older ones


@dataclass(frozen=True)
class Sample:
    """What a job measured around one step. A value that it does not measure is None."""

    time: Time  # seconds since the epoch
    attempt: int
    step: int
    loss: float | None = None
    samples_per_s: float | None = None  # of all ranks together
    tokens_per_s: float | None = None
    mfu: float | None = None  # model FLOPs utilisation, from 0 to 1, as the shares
    communication: float | None = None  # share of the time in which a collective was under way
    data_wait: float | None = None  # share of the time in which rank 0 waited for data
    step_seconds: float | None = None  # of the median rank
    slowest_seconds: float | None = None  # work of the rank that works longest in a step
    slowest_rank: int | None = None
    memory: float | None = None  # bytes that the pod uses which uses the most


@dataclass(frozen=True)
class GpuUsage:
    """What one GPU of a pod does, as NVML tells it."""

    busy: float  # share of the time in which a kernel ran, from 0 to 1
    memory: int  # bytes used
    memory_total: int
    watts: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class PodUsage:
    """What a pod used since the look before, about ten seconds. Rates are per second."""

    pod: int
    pod_name: str
    node: str
    time: Time  # seconds since the epoch, by the clock of the pod's node
    cpu: float | None = None  # processors
    cpu_limit: float | None = None  # that it may use at most
    memory: int | None = None  # bytes that count against the limit
    memory_limit: int | None = None
    received: float | None = None  # bytes, as sent, read and written
    sent: float | None = None
    disk_read: float | None = None
    disk_written: float | None = None
    gpus: list[GpuUsage] = field(default_factory=list)


@dataclass(frozen=True)
class PodStatus:
    """What a launcher tells of its pod in an attempt, with its heartbeat."""

    attempt: int
    ranks: list[RankStatus]
    usage: PodUsage | None = None  # once for each reading


@dataclass(frozen=True)
class Save:
    """A checkpoint that the job has saved."""

    time: Time  # seconds since the epoch, when the launcher of pod 0 saw it
    attempt: int
    step: int
    stored: bool  # in storage, as opposed to the memory of the pods


@dataclass(frozen=True)
class Telemetry:
    """The measurements of a job until one moment."""

    time: Time  # seconds since the epoch
    attempt: int = 0
    total_steps: int | None = None  # of the whole job, if a line of metrics says so
    history: list[Sample] = field(default_factory=list)  # oldest first
    ranks: list[RankStatus] = field(default_factory=list)
    pods: list[PodUsage] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)  # what the script and the job were set to: never secrets
    diverged: int | None = None  # the step since which the loss is infinite or no number; no sample has such a value
    saves: list[Save] = field(default_factory=list)  # oldest first
    saved: int = 0  # checkpoints that were noted, also those that `saves` leaves out


def latest_sample(history: Sequence[Sample]) -> Sample | None:
    """The last sample, with what only earlier ones of its attempt have measured; None: there is none."""
    if not history:
        return None
    same = [sample for sample in history if sample.attempt == history[-1].attempt]

    def value(name: str) -> Any:
        return next((found for sample in reversed(same) if (found := getattr(sample, name)) is not None), None)

    return Sample(**{each.name: value(each.name) for each in fields(Sample)})


def overlaid(former: T, later: T) -> T:
    """The later one of two values about a step, with what only the former one has."""
    return replace(later, **{name: value for name, value in vars(former).items() if vars(later)[name] is None})
