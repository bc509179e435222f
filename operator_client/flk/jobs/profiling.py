"""Profile ranks of a running job: a program beside each rank asks it, and the files come to this machine."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from flk.errors import ApiError, UsageError
from flk.jobs.copying import Container
from flk.kube import Object
from flk.manifest.runtime import module_source
from flk.observe.client import JobClient, container_of
from flk.observe.pods import with_packages
from flk_runtime.contract.values import dataclass

RANKS: Final = 16  # that are profiled at once
_FOLDERS: Final = "flk-*"  # of launchers, in the temporary folder of the container
_ENDING: Final = ".json.gz"  # of a trace in a pod; here it gets one by which TensorBoard finds it
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
) -> list[Path]:
    """Ask a rank for a profile, wait for it, fetch its files into a folder, and return their paths.

    ``python`` is the interpreter of its container. ``request`` has ``arguments`` for `flk_runtime.profiling.rank`.
    Raises ApiError with the reason if there is no profile.
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
            if not str(path).endswith(_ENDING):
                raise ApiError(f"{place.pod_name} sends a file {path!r}, which is no profile")
            target = folder / f"{name}-rank{place.rank}.pt.trace{_ENDING}"
            files.append(Path(source.read(path, str(target), note)))
    finally:
        client.execute(place.pod, ["rm", "-f", *answer["files"]], 30.0)
    return files


def _packed(*words: str) -> list[str]:
    """Return words compressed: the API server gets them in an address, and some proxies take no long ones."""
    return [base64.urlsafe_b64encode(zlib.compress(word.encode(), 9)).decode() for word in words]


def _error(client: JobClient, name: str, place: RankPlace, answer: dict[str, Any]) -> ApiError:
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
    return ApiError(sentence.format(**words), hint=hint.format(**words))
