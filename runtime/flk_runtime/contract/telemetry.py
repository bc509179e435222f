"""Telemetry: the measurements of a job that its launchers keep, for `flk top`, `flk report` and the metrics page.

The launcher of pod 0 has the measurements of all pods. `python -m flk_runtime metrics`, in its container, prints them
as JSON, and the archived record of the job holds the last ones, compressed and cut to a few kilobytes: floats keep four
digits and times whole seconds, and the history is one list for each field of a sample, which compresses better. All
lists are bounded, whatever the job's size and duration.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from flk_runtime.contract import foreign
from flk_runtime.contract.foreign import Time
from flk_runtime.contract.log_format import Measured
from flk_runtime.contract.status import SIGNS, RankStatus
from flk_runtime.contract.values import asdict, dataclass, field, fields, replace

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

HISTORY_LIMIT: Final = 500  # samples of a job's history; with more, neighbours are merged
RANKS_LIMIT: Final = 256  # ranks that are listed, the slowest first
PODS_LIMIT: Final = 256  # pods that are listed, those with the slowest ranks first


@dataclass(frozen=True)
class Sample(Measured):
    """What a job measured around one step: what rank 0 printed, and what only all ranks together show."""

    time: Time  # seconds since the epoch
    attempt: int
    step: int
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
    gpus: list[GpuUsage] = field(default_factory=list)


@dataclass(frozen=True)
class PodStatus:
    """What a launcher tells of its pod in an attempt, with its heartbeat."""

    attempt: int
    ranks: list[RankStatus]
    usage: PodUsage | None = None  # once for each reading


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


ARCHIVE_LIMIT: Final = 6000  # bytes of a packed telemetry
_INFLATED_LIMIT: Final = 1 << 20  # bytes that are read: the text may come from elsewhere
_KEPT_SAMPLES, _KEPT_LISTED = 240, 64  # that are tried first: samples, and ranks and pods
_COLUMNS: Final = [field.name for field in fields(Sample)]


def pack_telemetry(telemetry: Telemetry, limit: int = ARCHIVE_LIMIT) -> str:
    """The telemetry as text of at most ``limit`` bytes. Samples are left out evenly, and ranks and pods from the end.

    Empty if not even two samples fit.
    """
    samples, listed = _KEPT_SAMPLES, _KEPT_LISTED
    while samples > 1:
        text = _packed(telemetry, samples, listed)
        if len(text) <= limit:
            return text
        samples, listed = samples * 3 // 4, listed * 3 // 4
    return ""


def unpack_telemetry(text: str) -> Telemetry | None:
    """The telemetry that `pack_telemetry` has written; None if the text is none."""
    try:
        inflater = zlib.decompressobj()
        data = foreign.parse_object(inflater.decompress(base64.b64decode(text), _INFLATED_LIMIT))
        columns = data["history"]
        rows = zip(*columns.values(), strict=True)
        data["history"] = [dict(zip(columns, row, strict=True)) for row in rows]
        return foreign.read(Telemetry, data)
    except (*foreign.ERRORS, zlib.error):
        return None


def _packed(telemetry: Telemetry, samples: int, listed: int) -> str:
    history = thinned(telemetry.history, samples)
    data = asdict(replace(telemetry, history=[], ranks=telemetry.ranks[:listed], pods=telemetry.pods[:listed]))
    data["history"] = {name: [getattr(sample, name) for sample in history] for name in _COLUMNS}
    data["ranks"] = [{name: value for name, value in rank.items() if name not in SIGNS} for rank in data["ranks"]]
    return base64.b64encode(zlib.compress(json.dumps(_rounded(data), separators=(",", ":")).encode(), 9)).decode()


def thinned(history: Sequence[Sample], limit: int) -> list[Sample]:
    """At most ``limit`` samples, two or more, evenly chosen, with the first and the last one."""
    if len(history) <= limit:
        return list(history)
    return [history[round(index * (len(history) - 1) / (limit - 1))] for index in range(limit)]


def _rounded(value: Any, name: str = "") -> Any:
    """The field's value with four digits of each float, a time in whole seconds, and without fields that are None."""
    if isinstance(value, float):
        return round(value) if name == "time" else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each, name) for name, each in value.items() if each is not None}
    return [_rounded(each, name) for each in value] if isinstance(value, list) else value
