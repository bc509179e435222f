"""Name the ranks that a hang waits for, and say in one sentence what they do: pure functions over snapshots.

`to_dict` groups the snapshots of all ranks: equal stacks once, the odd ones first, cut to a bounded size.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

from flk_runtime.contract.pod_layout import RUNTIME_PACKAGES
from flk_runtime.contract.quantities import numbered
from flk_runtime.launcher.hangs.snapshot import Frame, Snapshot
from flk_runtime.shared.observer import Pending, is_default

_DATA_LOADER: Final = "waits in its DataLoader"
# The activity of a rank, by file and function of a call on its main thread's stack. The first row that matches counts.
_ACTIVITIES: Final = (
    (r"torch/utils/data/dataloader\.py$", r"_try_get_data|_get_data|_next_data|__next__", _DATA_LOADER),
    (r"<frozen importlib\._bootstrap>$", r"acquire|__enter__|_lock_unlock_module", "waits for another thread's import"),
    (r"<frozen importlib\._bootstrap", r".*", "imports a module"),
    (
        r"(^|/)torch/distributed/",
        r"store_based_barrier|.*rendezvous.*|_store_.*",
        "waits for the other ranks in a store",
    ),
    (r"(^|/)subprocess\.py$", r"wait|_wait|communicate|_communicate|_try_wait", "waits for a process that it started"),
    (r"(^|/)(ssl|socket|http/client|urllib3/.*)\.py$", r".*", "waits for the network"),
    (r"(^|/)(queue|multiprocessing/queues)\.py$", r"get|put", "waits for a queue"),
    (r"(^|/)threading\.py$", r"wait|acquire|join|_wait_for_tstate_lock|_shutdown", "waits for another thread"),
    (r"(^|/)concurrent/futures/.*\.py$", r".*", "waits for another thread"),
)
_LIBRARY = re.compile(rf"^<|^torch/|(^|/)python3\.\d+/|(^|/)({'|'.join(RUNTIME_PACKAGES)})/")
_C10D = re.compile(r"(^|/)torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_NOT_COLLECTIVES = ("wrapper", "<lambda>", "_object_to_tensor", "_tensor_to_object")
_PREFLIGHT = re.compile(r"(^|/)flk_runtime/preflight/")
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Diagnosis:
    """Why ranks wait for each other."""

    ranks: tuple[int, ...]  # that behave differently from the others; all ranks if none does
    predicate: str  # of these ranks: "did not reach all_reduce 812; it waits in its DataLoader"

    def sentence(self) -> str:
        """The cause in one sentence."""
        return f"{numbered('rank', self.ranks)} {self.predicate}"


def diagnose(snapshots: Sequence[Snapshot]) -> Diagnosis:
    """Find the ranks that the others wait for.

    In this order: ranks that did not reach a collective that others are in, ranks that are in another collective than
    most, ranks that are not in torch.distributed while others are.
    """
    return _by_flight_recorder(snapshots) or _by_stacks(snapshots)


def activity(snapshot: Snapshot) -> str:
    """The activity of a rank, as the predicate of a sentence."""
    if snapshot.state == "T":
        return "is stopped (SIGSTOP)"
    if snapshot.state == "D":
        return _at("waits for a disk or a device", snapshot)
    stuck = "" if snapshot.answers else ", in native code that holds Python's lock (GIL)"
    for file, function, predicate in _ACTIVITIES:
        if not any(re.search(file, frame.file) and re.fullmatch(function, frame.function) for frame in snapshot.main):
            continue
        worker = user_frame(snapshot.workers[0]) if snapshot.workers else None
        if predicate == _DATA_LOADER and worker:
            return f"{_at(f'{predicate} for a worker process', snapshot)}; the worker is at {worker.place}"
        return _at(predicate, snapshot) + stuck
    waits = in_collective(snapshot)
    if waits:
        return _at(f"is in {waits}", snapshot)
    return (_at("is", snapshot) if snapshot.main else "shows no Python stack") + stuck


def in_collective(snapshot: Snapshot) -> str:
    """The collective that the rank waits in, or an empty string. By the flight recorder, else by its stack."""
    if snapshot.pending:
        return str(snapshot.pending[0])
    function = ""
    for frame in snapshot.main:
        if frame.function == _BACKWARD:
            return "the backward pass"
        if _PREFLIGHT.search(frame.file):
            return "flk_runtime.init"
        if _C10D.search(frame.file) and frame.function not in _NOT_COLLECTIVES:
            function = frame.function  # the outermost: all_gather_object and not the all_gather that it calls
    return function


def _by_flight_recorder(snapshots: Sequence[Snapshot]) -> Diagnosis | None:
    waiting: dict[tuple[str, int], dict[int, Pending]] = {}  # ranks in each collective, by group and number
    for snapshot in snapshots:
        for pending in snapshot.pending[:1]:
            waiting.setdefault((pending.group, pending.number), {})[snapshot.rank] = pending
    # The collective that most ranks wait in; of several, the collective that was begun first.
    by_size = sorted(waiting.items(), key=lambda item: (-len(item[1]), item[0][1]))
    for (group, number), ranks in by_size:
        names = {rank: str(pending) for rank, pending in ranks.items()}
        missing = [each for each in snapshots if each.rank not in ranks and _belongs(each, group, number)]
        if missing:
            return _missing(missing, _usual(names))
        sizes = {rank: f"{pending} with sizes {pending.sizes}" for rank, pending in ranks.items()}
        if odd := _odd(names) or _odd(sizes):
            return odd
    if not by_size:
        return None
    _, ranks = by_size[0]
    return Diagnosis(tuple(sorted(ranks)), f"{_is(ranks)} in {next(iter(ranks.values()))}")


def _belongs(snapshot: Snapshot, group: str, number: int) -> bool:
    """Return whether the rank is a member of the group, as far as is known, and has not reached this collective."""
    if group in snapshot.groups:
        return snapshot.groups[group] < number
    # A rank that does not answer, or has used no group yet, misses the default group.
    return is_default(group)


def _by_stacks(snapshots: Sequence[Snapshot]) -> Diagnosis:
    inside = {each.rank: name for each in snapshots if (name := in_collective(each))}
    outside = [each for each in snapshots if each.rank not in inside]
    if inside and outside:
        return _missing(outside, _usual(inside))
    if odd := _odd(inside):
        return odd
    does = _common_activity(snapshots)
    if does and len(snapshots) > 1:
        does = f"do the same: each {does}"
    return Diagnosis(tuple(sorted(each.rank for each in snapshots)), does or "are at different places")


def _usual(where: Mapping[int, str]) -> str:
    """The place at which most ranks are."""
    return collections.Counter(where.values()).most_common(1)[0][0]


def _odd(where: Mapping[int, str]) -> Diagnosis | None:
    """The first ranks that are elsewhere than most of them; None if all are at the same place."""
    usual = _usual(where) if where else ""
    odd = next((where[rank] for rank in sorted(where) if where[rank] != usual), "")
    ranks = tuple(sorted(rank for rank, place in where.items() if place == odd))
    return Diagnosis(ranks, f"{_is(ranks)} in {odd}, the others in {usual}") if ranks else None


def _is(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


def _missing(ranks: Sequence[Snapshot], collective: str) -> Diagnosis:
    does = _common_activity(ranks)
    aside = f"; {'it' if len(ranks) == 1 else 'each'} {does}" if does else ""
    return Diagnosis(tuple(each.rank for each in ranks), f"did not reach {collective}{aside}")


def _common_activity(ranks: Sequence[Snapshot]) -> str:
    """The activity of these ranks as a predicate, if it is the same for all; else empty."""
    told = {activity(each) for each in ranks}
    return told.pop() if len(told) == 1 else ""


def _at(predicate: str, snapshot: Snapshot) -> str:
    """The predicate with the innermost line of the user's own code."""
    frame = user_frame(snapshot.main)
    return f"{predicate} at {frame.place}" if frame else predicate


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is neither of a library nor of Python itself; the innermost one if there is none."""
    return next((frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0] if stack else None)


_GROUPS: Final = 16  # of equal stacks in a report
_FRAMES: Final = 16  # of one stack


def to_dict(snapshots: Sequence[Snapshot], diagnosis: Diagnosis, silent: Sequence[str]) -> dict[str, Any]:
    """The report, as JSON: the cause, and each stack with the ranks that share it, the odd ones first.

    ``silent`` are the pods that sent no stacks. Without snapshots the cause is empty.
    """
    by_key: dict[str, list[Snapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.rank):
        by_key.setdefault(snapshot.key, []).append(snapshot)
    odd = set(diagnosis.ranks)
    groups = sorted(
        by_key.values(), key=lambda group: (not any(each.rank in odd for each in group), len(group), group[0].rank)
    )
    shown: list[dict[str, Any]] = [
        {"ranks": [each.rank for each in group], "heading": _heading(group), "lines": stack_lines(group[0])}
        for group in groups[:_GROUPS]
    ]
    if left := [each.rank for group in groups[_GROUPS:] for each in group]:
        shown.append({"ranks": left, "heading": f"other stacks of {numbered('rank', left)} are left out", "lines": []})
    return {"cause": diagnosis.sentence() if snapshots else "", "groups": shown, "silent": list(silent)}


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """The groups of a report as lines for people."""
    result = [line for group in report["groups"] for line in (group["heading"], *group["lines"])]
    return result + ([f"no stacks from {', '.join(report['silent'][:_GROUPS])}"] if report["silent"] else [])


def stack_lines(snapshot: Snapshot) -> list[str]:
    """The stack of a rank, innermost call first, with the processes that it started."""
    result = _indented(snapshot.main) or ["  no Python stack"]
    for thread in snapshot.threads if not in_collective(snapshot) else ():
        result += ["  another thread:", *_indented(thread, "  ")]
    for worker in snapshot.workers[:1]:
        result += ["  a process that it started:", *_indented(worker, "  ")]
    return result


def _heading(group: Sequence[Snapshot]) -> str:
    first = group[0]
    if len(group) > 1:
        return f"{numbered('rank', (each.rank for each in group))}: each {activity(first)}"
    node = f" on {first.node}" if first.node else ""
    return f"rank {first.rank} in {first.pod_name}{node}: {activity(first)}"


def _indented(stack: Sequence[Frame], indent: str = "") -> list[str]:
    """The innermost frames, and the user's own one if it is further out."""
    outer = [frame for frame in [user_frame(stack)] if frame and frame not in stack[:_FRAMES]]
    return [f"{indent}  {frame}" for frame in [*stack[:_FRAMES], *outer]]
