"""Trace: a summary of what torch's profiler has recorded of some steps of a rank, from its trace as JSON."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flk.errors import ApiError
from flk_runtime.contract import foreign

_MOST: Final = 1 << 29  # bytes of a trace: it comes from a pod
_STEP: Final = "ProfilerStep#"
_LOADER: Final = "enumerate(DataLoader)#"
_COLLECTIVES: Final = ("gloo:", "nccl:", "ucc:", "mpi:", "xccl:")
_ON_CPU: Final = ("cpu_op", "user_annotation")
_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_Interval = tuple[float, float]  # microseconds: begin and end


@dataclass(frozen=True)
class Operator:
    """One operator or kernel: how often it ran in the steps that were measured, and its own time in seconds."""

    name: str
    calls: int
    seconds: float  # on a CPU without what it called
    share: float  # of the time that was measured, from 0 to 1


@dataclass(frozen=True)
class TraceSummary:
    """What the steps of one rank took. Shares are from 0 to 1, of the time of all steps."""

    steps: int
    seconds: float  # of all steps
    longest: float  # seconds of the longest step
    communication: float  # share in which a collective was under way
    data_wait: float  # share in which the loop waited for a batch of torch's DataLoader
    outside: float  # share in which the thread that trains was in no operator: Python, or waiting
    gpu_busy: float | None = None  # share in which a kernel ran; None without a GPU
    cpu: list[Operator] = field(default_factory=list)  # of the thread that trains, by own time
    gpu: list[Operator] = field(default_factory=list)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace that is compressed by gzip. Raises ApiError if the file has none."""
    try:
        with gzip.open(path) as file:
            events: list[dict[str, Any]] = json.loads(file.read(_MOST))["traceEvents"]
            return events
    except (OSError, EOFError, zlib.error, *foreign.ERRORS):
        raise ApiError(f"{path} is no trace of torch's profiler") from None


def summary_of(path: Path) -> TraceSummary | None:
    """Return the summary of a trace in a file; None if it has no whole step. Raises ApiError if it is none."""
    try:
        return summarize(read_trace(path))
    except foreign.ERRORS:
        raise ApiError(f"{path} is no trace of torch's profiler") from None


def summarize(events: Iterable[dict[str, Any]]) -> TraceSummary | None:
    """Return the summary of a trace; None if it has no whole step."""
    spans = [each for each in events if each.get("ph") == "X" and "dur" in each]
    steps = [each for each in spans if each["name"].startswith(_STEP) and each.get("cat") == "user_annotation"]
    if not steps:
        return None
    window = [_interval(each) for each in steps]
    total = _length(window)
    thread = _thread(steps[0])
    on_cpu = [each for each in spans if each.get("cat") in _ON_CPU and not each["name"].startswith(_STEP)]
    own = _inside([each for each in on_cpu if _thread(each) == thread], window)
    on_gpu = _inside([each for each in spans if each.get("cat") in _ON_GPU], window)
    kernels = [each for each in on_gpu if "nccl" in each["name"].lower()]
    collectives = kernels or [each for each in on_cpu if each["name"].startswith(_COLLECTIVES)]
    return TraceSummary(
        len(steps),
        total / 1e6,
        max(end - begin for begin, end in window) / 1e6,
        _share(collectives, window),
        _share([each for each in own if each["name"].startswith(_LOADER)], window),
        max(0.0, 1 - _share(own, window)),
        _share(on_gpu, window) if on_gpu else None,
        _operators(_own_times(own), total),
        _operators([(each["name"], each["dur"]) for each in on_gpu], total),
    )


def _own_times(spans: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return for each span of one thread its name, and its time without the spans inside it."""
    found: list[tuple[str, float]] = []
    open_spans: list[tuple[float, int]] = []  # end, and place in what was found
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        begin, end = _interval(span)
        while open_spans and open_spans[-1][0] <= begin:
            open_spans.pop()
        if open_spans:
            outer_end, place = open_spans[-1]
            name, seconds = found[place]
            found[place] = name, seconds - (min(end, outer_end) - begin)
        open_spans.append((end, len(found)))
        found.append((span["name"], end - begin))
    return found


def _operators(times: Iterable[tuple[str, float]], total: float) -> list[Operator]:
    calls: dict[str, int] = defaultdict(int)
    sums: dict[str, float] = defaultdict(float)
    for name, duration in times:
        calls[name] += 1
        sums[name] += duration
    ordered = sorted(sums, key=lambda name: (-sums[name], name))
    return [Operator(name, calls[name], sums[name] / 1e6, sums[name] / total) for name in ordered]


def _share(spans: Iterable[dict[str, Any]], window: Sequence[_Interval]) -> float:
    """Return the share of the window that is covered by spans."""
    covered = _union(map(_interval, spans))
    both = 0.0
    for begin, end in window:
        both += sum(max(0.0, min(end, last) - max(begin, first)) for first, last in covered)
    return both / _length(window)


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    found: list[_Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _inside(spans: Iterable[dict[str, Any]], window: Sequence[_Interval]) -> list[dict[str, Any]]:
    """Return the spans that begin within the steps."""
    first, last = min(window)[0], max(end for _, end in window)
    return [each for each in spans if first <= float(each["ts"]) < last]


def _length(window: Iterable[_Interval]) -> float:
    return sum(end - begin for begin, end in window)


def _interval(span: dict[str, Any]) -> _Interval:
    return float(span["ts"]), float(span["ts"]) + float(span["dur"])


def _thread(span: dict[str, Any]) -> tuple[Any, Any]:
    return span.get("pid"), span.get("tid")
