"""The text of `flk top`: lines of a job for a width. Pure functions of what was read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from flk.cli.output import cut, pace, phase_style, table
from flk.cli.status import pods_table
from flk.observe.progress import Progress
from flk.spec.units import bytes_text, number_text, short_duration
from flk.user.terminal import printable
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import PodUsage, Sample, Telemetry, latest_sample
from flk_runtime.contract.values import dataclass

if TYPE_CHECKING:
    from flk.jobs.state import State

_BARS: Final = " ▁▂▃▄▅▆▇█"
_LABEL: Final = 22  # columns before a sparkline
_DAY: Final = 20 * 3600.0  # seconds from which on a time axis has dates
_STALE: Final = 20.0  # seconds by which what two pods tell of their ranks may differ in age


class Line(NamedTuple):
    """A line of text, and how it is shown: "", "bold", "bad", "warn" or "dim"."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class TopData:
    """What is known of a job at one moment. Times are in seconds since the epoch, by the API server's clock."""

    state: State
    now: float
    telemetry: Telemetry | None = None
    missing: str = ""  # why there is no telemetry
    outage: str = ""  # what the API server's silence is; empty: it answers


def pace_of(state: State, telemetry: Telemetry | None) -> Progress | None:
    """Return how far and how fast a job is by its telemetry, else by the metrics that it prints."""
    if telemetry is not None and (last := latest_sample(telemetry.history)):
        return Progress(0, last.step, last.time, telemetry.total_steps, last.step_seconds, **last.measured())
    return max(state.progress, key=lambda progress: progress.step, default=None)


def job_lines(data: TopData, width: int) -> list[Line]:
    """Return the lines of one job: head, sparklines, nodes with their ranks, the worst first."""
    state, telemetry = data.state, data.telemetry
    lines = _head(data)
    if telemetry is not None and telemetry.history:
        lines += [Line(""), *_sparklines(telemetry.history, width)]
    if telemetry is not None and telemetry.diverged is not None:
        lines.append(Line(f"the loss is infinite or no number since step {telemetry.diverged:,}", "bad"))
    lines += [Line(each.summary, "warn") for each in state.slow]
    lines.append(Line(""))
    if telemetry is not None and telemetry.ranks:
        lines += _nodes(state, telemetry)
    else:
        if data.missing and not state.finished and any(pod.phase == "Running" for pod in state.pods):
            lines.append(Line(f"no measurements of ranks: {data.missing}", "dim"))
        lines += map(Line, pods_table(state, wide=False) if state.pods else [])
    return [Line(cut(printable(line.text).rstrip(), width), line.style) for line in lines]


def _head(data: TopData) -> list[Line]:
    state, telemetry = data.state, data.telemetry
    since = f" for {short_duration(data.now - state.since)}" if state.since and not state.finished else ""
    attempt = f"   attempt {state.attempt}" if state.attempts else ""
    first = f"{state.name}   {state.phase}{since}{attempt}   {state.ready}/{plural(state.replicas, 'pod')}"
    clock = time.strftime("%H:%M:%S", time.localtime(data.now))
    lines = [Line(f"{first}   {clock}", phase_style(str(state.phase)) or "bold")]
    if data.outage:
        lines.append(Line(data.outage, "bad"))
    if state.message:
        lines.append(Line(f"{state.reason}: {state.message}" if state.reason else state.message, "warn"))
    known = pace_of(state, telemetry)
    parts = pace(known, state.finished) if known else []
    if state.goodput and state.goodput.share is not None:
        parts.append(f"goodput {state.goodput.share:.0%}")
    return [*lines, Line("   ".join(parts))] if parts else lines


def _sparklines(history: Sequence[Sample], width: int) -> list[Line]:
    """Return the loss and the throughput over one time axis, on which ``|`` is where an attempt begins."""
    columns = max(2, min(120, width - _LABEL - 1, len(history)))
    times = [sample.time for sample in history]
    begin, end = min(times), max(times)  # a clock may go back, and pod 0 to a node whose clock is behind
    place = (columns - 1) / (end - begin) if end > begin else 0.0

    def values(of: Callable[[Sample], float | None]) -> list[float | None]:
        sums: list[list[float]] = [[] for _ in range(columns)]
        for sample in history:
            value = of(sample)
            if value is not None and value == value:  # not NaN
                sums[int((sample.time - begin) * place)].append(value)
        return [sum(each) / len(each) if each else None for each in sums]

    lines = []
    for name, of in (("loss", lambda sample: sample.loss), _throughput(history)):
        found = values(of)
        known = [value for value in found if value is not None]
        if known:
            lines.append(Line(f"{f'{name} {number_text(known[-1])}'.ljust(_LABEL)}{sparkline(found)}"))
    if lines:
        axis = ["─"] * columns
        for before, sample in pairwise(history):
            if sample.attempt != before.attempt:
                axis[int((sample.time - begin) * place)] = "|"
        day = "%H:%M:%S" if end - begin < _DAY else "%m-%d"
        marks = " to ".join(time.strftime(day, time.localtime(each)) for each in (begin, end))
        lines.append(Line(marks.ljust(_LABEL) + "".join(axis), "dim"))
    return lines


def _throughput(history: Sequence[Sample]) -> tuple[str, Callable[[Sample], float | None]]:
    """Return the name of the throughput that a job measures, and how a sample has it: steps, where it has no other."""
    if any(sample.tokens_per_s is not None for sample in history):
        return "tokens/s", lambda sample: sample.tokens_per_s
    if any(sample.samples_per_s is not None for sample in history):
        return "samples/s", lambda sample: sample.samples_per_s
    return "steps/s", lambda sample: 1 / sample.step_seconds if sample.step_seconds else None


def sparkline(values: Iterable[float | None]) -> str:
    """Return a bar for each value, from the least to the largest; a blank for None."""
    given = list(values)
    known = [value for value in given if value is not None and abs(value) != float("inf")]
    if not known:
        return " " * len(given)
    low, span = min(known), max(known) - min(known)
    top = len(_BARS) - 2

    def bar(value: float) -> str:
        return _BARS[1 + (round(top * min(1.0, (value - low) / span)) if span else top // 2)]

    return "".join(" " if value is None else bar(value) for value in given)


def _nodes(state: State, telemetry: Telemetry) -> list[Line]:
    """Return a block for each node: its pods' usage, and a line for each rank."""
    usage = {each.pod: each for each in telemetry.pods}
    pods = {pod.index: pod for pod in state.pods}
    by_node: dict[str, list[RankStatus]] = defaultdict(list)
    for rank in telemetry.ranks:
        pod = usage.get(rank.pod) or pods.get(rank.pod)
        by_node[pod.node if pod else ""].append(rank)
    furthest = max(rank.step for rank in telemetry.ranks)
    for ranks in by_node.values():
        ranks.sort(key=_badness)
    nodes = sorted(by_node.items(), key=lambda item: _badness(item[1][0]))
    in_order = [rank for _, ranks in nodes for rank in ranks]
    titles = ["", "RANK", "STEP", "STEP TIME", "WORK", "DATA", "MEMORY", "GPU", "PHASE", ""]
    rows = [
        [
            ">" if rank.slow else " ",
            str(rank.rank),
            "" if rank.step < 0 else f"{rank.step:,}",
            "" if rank.step_seconds is None else f"{rank.step_seconds:.3g} s",
            "" if rank.work is None else f"{rank.work:.0%}",
            "" if rank.data_wait is None else f"{rank.data_wait:.0%}",
            bytes_text(rank.memory),
            _gpu(rank, usage.get(rank.pod), state.processes),
            rank.phase,
            _remark(rank, furthest),
        ]
        for rank in in_order
    ]
    told = {title for row in rows for title, cell in zip(titles, row, strict=True) if cell}
    without = {"DATA", "GPU"} - told  # not all jobs tell of these two
    head, *body = [line.removesuffix("   -") for line in table(titles, rows, without=without)]
    text_of = dict(zip((rank.rank for rank in in_order), body, strict=True))
    lines = [Line(head.replace("-", " ", 1), "bold")]
    for node, ranks in nodes:
        lines.append(Line(f"node {node or '?'}", "bold"))
        used = sorted({rank.pod for rank in ranks} & usage.keys())
        lines += [Line(f"  {_usage(usage[index])}", "dim") for index in used]
        lines += [Line(text_of[rank.rank], "warn" if rank.slow else "") for rank in ranks]
    left = state.world_size - len(telemetry.ranks)
    if left > 0:
        lines.append(Line(f"and {left:,} more ranks, none of them slower", "dim"))
    return lines


def _badness(rank: RankStatus) -> tuple[float, int, int]:
    return -(rank.slow or 0.0), rank.step, rank.rank


def _gpu(rank: RankStatus, pod: PodUsage | None, processes: int) -> str:
    """Return how busy the GPU of a rank is; empty where its pod has not told of one GPU for each rank."""
    if pod is None or len(pod.gpus) != processes:
        return ""
    return f"{pod.gpus[rank.rank % processes].busy:.0%}"


def _usage(pod: PodUsage) -> str:
    """Return what a pod uses, in one line."""
    parts = [pod.pod_name]
    if pod.cpu is not None:
        limit = f" of {pod.cpu_limit:.3g}" if pod.cpu_limit else ""
        parts.append(f"CPU {pod.cpu:.2f}{limit}")
    if pod.memory is not None:
        limit = f" of {bytes_text(pod.memory_limit)}" if pod.memory_limit else ""
        parts.append(f"memory {bytes_text(pod.memory)}{limit}")
    if pod.gpus:
        busy = " ".join(f"{gpu.busy:.0%}" for gpu in pod.gpus)
        used = sum(gpu.memory for gpu in pod.gpus)
        parts.append(f"GPU {busy}, {bytes_text(used)} of {bytes_text(sum(gpu.memory_total for gpu in pod.gpus))}")
    return "  ".join(parts)


def _remark(rank: RankStatus, furthest: int) -> str:
    if rank.slow:
        return f"slow: {rank.slow:.1f} times the median"
    behind = furthest - rank.step
    late = rank.step >= 0 and behind * (rank.step_seconds or 0.0) > _STALE
    return f"{behind:,} steps behind" if late else ""
