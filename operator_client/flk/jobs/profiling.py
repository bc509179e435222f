"""Profile ranks of a running job: a program beside each rank asks it, and the files come to this machine."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flk.errors import ApiError, FlkError, UsageError
from flk.jobs.copying import Container
from flk.kube import Object
from flk.manifest.runtime import module_source
from flk.observe.client import JobClient, container_of
from flk.observe.pods import with_packages
from flk_runtime.contract import foreign

RANKS: Final = 16  # that are profiled at once
_FOLDERS: Final = "flk-*"  # of launchers, in the temporary folder of the container
_KINDS: Final = ("json.gz", "pickle")  # of files that a profile has
_LONGEST: Final = 3600.0  # seconds for all steps
_START: Final = (
    "import base64,sys,zlib;"
    "sys.argv[1:]=[zlib.decompress(base64.urlsafe_b64decode(w)).decode() for w in sys.argv[1:]];exec(sys.argv.pop(1))"
)
# What an answer's error means, and what to do about it. {rank}, {pod}, {detail} and the fields of the answer stand in.
_ERRORS: Final[dict[str, tuple[str, str]]] = {
    "absent": ("rank {rank} does not run in {pod} now", "{why} says what the job does"),
    "silent": (
        "rank {rank} does not answer: native code holds Python's lock (GIL), or its process is stopped",
        "{stacks} shows where the others are",
    ),
    "ended": ("rank {rank} ended before the profile was whole", "{status} says how"),
    "busy": ("rank {rank} is being profiled already", "wait for the end of that profile"),
    "profiled": ("the script of rank {rank} runs a profiler of its own", "torch allows one at a time"),
    "no torch": ("the script of rank {rank} has not imported torch", "{stacks} shows what it does"),
    "failed": ("the profiler of rank {rank} failed, and the training goes on: {detail}", ""),
}


@dataclass(frozen=True)
class RankPlace:
    """A rank, its pod, and which of the pod's ranks it is."""

    rank: int
    pod: Object
    local_rank: int

    @property
    def pod_name(self) -> str:
        """The name of the pod."""
        return str(self.pod["metadata"]["name"])


@dataclass(frozen=True)
class Profiled:
    """The answer of a rank, and the files on this machine."""

    rank: int
    pod: str
    answer: dict[str, Any]
    files: list[Path]


def places(client: JobClient, name: str, ranks: Sequence[int] | None) -> list[RankPlace]:
    """Return where ranks run; None means all of the latest attempt.

    Raises UsageError if the job has no such rank, does not use flk's launcher or there are more than RANKS, and
    ApiError if a pod does not run now.
    """
    from flk.observe.reader import view_with_ranks

    view = view_with_ranks(client, name)
    known = {rank: (pod, place) for pod in view.pods for place, rank in enumerate(pod.ranks)}
    chosen = sorted(known) if ranks is None else sorted(set(ranks))
    missing = [rank for rank in chosen if rank not in known]
    if missing:
        raise UsageError(
            f"--rank: job {name} has no rank {missing[0]}" + (f"; it has ranks 0 to {max(known)}" if known else "")
        )
    if len(chosen) > RANKS:
        raise UsageError(f"--rank: names {len(chosen)} ranks, and at most {RANKS} are profiled at once")
    found = []
    for rank in chosen:
        pod, place = known[rank]
        if str(pod.phase) != "Running":
            raise ApiError(
                f"rank {rank} does not run: pod {pod.name} is {str(pod.phase).lower()}",
                hint=f"{client.commands.flk('why', name)} says why",
            )
        found.append(RankPlace(rank, view.objects[pod.name], place))
    return found


def profile(
    client: JobClient,
    name: str,
    place: RankPlace,
    python: str,
    request: dict[str, Any],
    folder: Path,
    note: Callable[[str], None],
) -> Profiled:
    """Ask a rank for a profile, wait for it, and fetch its files into a folder.

    ``python`` is the interpreter of its container. ``request`` has ``arguments`` for `flk_runtime.profiling.rank`.
    Raises ApiError or UsageError with the reason if there is no profile.
    """
    asked = {
        "folders": _FOLDERS,
        "local_rank": place.local_rank,
        "arguments": {**request["arguments"], "rank": place.rank},
        "source": module_source("flk_runtime/profiling/rank.py"),
    }
    container = container_of(place.pod)
    words = [python, "-c", _START, *_packed(module_source("flk_runtime/profiling/ask.py"), json.dumps(asked))]
    done = client.execute(place.pod, with_packages(place.pod, container, words), _LONGEST)
    answer: dict[str, Any] = done.answer(f"the program beside rank {place.rank} in {place.pod_name}")
    if "error" in answer:
        raise _error(client, name, place, answer)
    source = Container(client, place.pod_name, container)
    files = []
    try:
        for path in answer["files"]:
            kind = str(path).partition(".")[2]
            if kind not in _KINDS:
                raise ApiError(f"{place.pod_name} sends a file {path!r}, which is no profile")
            target = folder / f"{name}-rank{place.rank}.{kind}"
            files.append(Path(source.read(path, str(target), note).path))
    finally:
        client.execute(place.pod, ["rm", "-f", *answer["files"]], 30.0)
    return Profiled(place.rank, place.pod_name, answer, files)


def _packed(*words: str) -> list[str]:
    """Return words compressed: the API server gets them in an address, and some proxies take no long ones."""
    return [base64.urlsafe_b64encode(zlib.compress(word.encode(), 9)).decode() for word in words]


def _error(client: JobClient, name: str, place: RankPlace, answer: dict[str, Any]) -> FlkError:
    """Return the error that an answer means."""
    flk = client.commands.flk
    if answer["error"] == "no steps":
        made = answer["made"]
        measured = answer["measured"]
        steps = f"made {measured} of the steps and then none" if measured else "made no step that flk sees"
        return ApiError(
            f"rank {place.rank} {steps} in {answer['seconds']} seconds"
            + (f"; it is at step {made}" if made >= 0 else ""),
            hint=f"{flk('stacks', name)} shows what it does",
        )
    sentence, hint = _ERRORS.get(answer["error"], (str(answer["error"]), ""))
    words = {
        "rank": place.rank,
        "pod": place.pod_name,
        "detail": answer.get("detail", ""),
        "why": flk("why", name),
        "status": flk("status", name),
        "stacks": flk("stacks", name),
    }
    kind = UsageError if answer["error"] == "no CUDA" else ApiError
    return kind(sentence.format(**words), hint=hint.format(**words))


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
