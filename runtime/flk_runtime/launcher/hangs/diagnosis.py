"""Name the ranks that a hang waits for, and say in one sentence what they do: pure functions over snapshots.

`to_dict` and `lines_of` print the snapshots of all ranks: equal stacks once, the odd ones first, cut to a bounded size.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flk_runtime.contract.pod_layout import RUNTIME_PACKAGES
from flk_runtime.contract.quantities import numbered
from flk_runtime.launcher.hangs.snapshot import Frame, Snapshot
from flk_runtime.shared.observer import Pending, is_default

_DATA_LOADER: Final = "waits in its DataLoader"
_IMPORT: Final = "imports a module"
# The activity of a rank, by file and function of a call on its main thread's stack. The first row that matches counts.
_ACTIVITIES: Final = (
    (r"torch/utils/data/dataloader\.py$", r"_try_get_data|_get_data|_next_data|__next__", _DATA_LOADER),
    (r"<frozen importlib\._bootstrap>$", r"acquire|__enter__|_lock_unlock_module", "waits for another thread's import"),
    (r"<frozen importlib\._bootstrap", r".*", _IMPORT),
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
_ACTIVITIES_TOLD: Final = 3  # different ones of ranks in one sentence


@dataclass(frozen=True)
class Diagnosis:
    """Why ranks wait for each other."""

    ranks: tuple[int, ...]  # that behave differently from the others; all ranks if none does
    predicate: str  # of these ranks: "did not reach all_reduce 812; it waits in its DataLoader"
    collective: str = ""  # that the others wait in

    def sentence(self) -> str:
        """The cause in one sentence."""
        return f"{numbered('rank', self.ranks)} {self.predicate}"


def diagnose(snapshots: Sequence[Snapshot], *, hung: bool = False) -> Diagnosis:
    """Find the ranks that the others wait for. ``hung``: no rank makes progress. Raises ValueError without snapshots.

    In this order: ranks that did not reach a collective that others are in, ranks that are in another collective than
    most, ranks that are not in torch.distributed while others are, ranks whose stack is rare.
    """
    if not snapshots:
        raise ValueError("a diagnosis needs at least one snapshot")
    return _by_flight_recorder(snapshots, hung) or _by_stacks(snapshots)


def told_with_waiting(diagnosis: Diagnosis, snapshots: Sequence[Snapshot]) -> str:
    """The cause in one sentence with the ranks that wait, and the line of source at which the first rank is."""
    waiting = {each.rank for each in snapshots}.difference(diagnosis.ranks) if diagnosis.collective else ()
    wait = f"{numbered('rank', waiting)} wait{'s' if len(waiting) == 1 else ''} for " if waiting else ""
    which = f"{numbered('rank', diagnosis.ranks)}{', which' if waiting else ''} {diagnosis.predicate}"
    frame = next(user_frame(each.main) for each in snapshots if each.rank == diagnosis.ranks[0])
    return wait + which + (f": {frame.text}" if frame and frame.text else "")


def activity(snapshot: Snapshot) -> str:
    """The activity of a rank, as the predicate of a sentence."""
    if snapshot.state == "T":
        return "is stopped (SIGSTOP)"
    if snapshot.state == "D":
        return _at("waits for a disk or a device", snapshot)
    stuck = "" if snapshot.answers else ", in native code that holds Python's lock (GIL)"
    for file, function, predicate in _ACTIVITIES:
        if not _contains(snapshot.main, file, function):
            continue
        worker = user_frame(snapshot.workers[0]) if snapshot.workers else None
        if predicate == _DATA_LOADER and worker:
            return f"{_at(f'{predicate} for a worker process', snapshot)}; the worker is at {worker.place}"
        if predicate == _IMPORT and any(_contains(stack, *_ACTIVITIES[1][:2]) for stack in snapshot.threads):
            predicate = "is in a deadlock of imports with another of its threads"
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


def odd_first(snapshots: Sequence[Snapshot], diagnosis: Diagnosis) -> list[list[Snapshot]]:
    """The snapshots grouped by equal stacks: groups with a rank of the diagnosis first, then the smaller ones."""
    groups: dict[str, list[Snapshot]] = {}
    for snapshot in sorted(snapshots, key=lambda each: each.rank):
        groups.setdefault(snapshot.key, []).append(snapshot)
    named = set(diagnosis.ranks)
    return sorted(
        groups.values(), key=lambda group: (not any(each.rank in named for each in group), len(group), group[0].rank)
    )


def _by_flight_recorder(snapshots: Sequence[Snapshot], hung: bool) -> Diagnosis | None:
    waiting: dict[tuple[str, int], dict[int, Pending]] = {}  # ranks in each collective, by group and number
    for snapshot in snapshots:
        for pending in snapshot.pending[:1]:
            waiting.setdefault((pending.group, pending.number), {})[snapshot.rank] = pending
    # The collective that most ranks wait in; of several, the collective that was begun first.
    for (group, number), ranks in sorted(waiting.items(), key=lambda item: (-len(item[1]), item[0][1])):
        usual = collections.Counter(pending.name for pending in ranks.values()).most_common(1)[0][0]
        awaited = next(pending for pending in ranks.values() if pending.name == usual)
        missing = [each for each in snapshots if each.rank not in ranks and _belongs(each, group, number)]
        if missing:
            predicate = f"did not reach {awaited}{_aside(missing)}"
            return Diagnosis(tuple(each.rank for each in missing), predicate, str(awaited))
        others = {rank: pending for rank, pending in ranks.items() if pending.name != usual}
        if others:
            first = min(others)
            verb = "is" if len(others) == 1 else "are"
            rest = "the others" if len(ranks) - len(others) > 1 else numbered("rank", ranks.keys() - others)
            predicate = f"{verb} in {others[first]}, {rest} in {awaited}"
            return Diagnosis(tuple(sorted(others)), predicate, str(awaited))
        sizes = collections.Counter(pending.sizes for pending in ranks.values())
        if len(sizes) > 1:
            usual_size = sizes.most_common(1)[0][0]
            differing = tuple(sorted(rank for rank, pending in ranks.items() if pending.sizes != usual_size))
            sent = f"sizes {ranks[differing[0]].sizes} into {awaited}, the others {usual_size}"
            return Diagnosis(differing, f"{'gives' if len(differing) == 1 else 'give'} tensors of {sent}", str(awaited))
    if waiting:
        (group, number), ranks = max(waiting.items(), key=lambda item: (len(item[1]), -item[0][1]))
        awaited = next(iter(ranks.values()))
        all_ranks = " all" if 1 < len(ranks) == len(snapshots) else ""
        end = ", which does not end" if hung else ""
        predicate = f"{'is' if len(ranks) == 1 else 'are'}{all_ranks} in {awaited}{end}"
        return Diagnosis(tuple(sorted(ranks)), predicate, str(awaited))
    return None


def _belongs(snapshot: Snapshot, group: str, number: int) -> bool:
    """Return whether the rank is a member of the group, as far as is known, and has not reached this collective."""
    if group in snapshot.groups:
        return snapshot.groups[group] < number
    # A rank that does not answer, or has used no group yet, misses the default group.
    return is_default(group)


def _by_stacks(snapshots: Sequence[Snapshot]) -> Diagnosis:
    where = {each.rank: in_collective(each) for each in snapshots}
    outside = [each for each in snapshots if not where[each.rank]]
    inside = collections.Counter(name for name in where.values() if name).most_common()
    if outside and inside:
        predicate = f"did not reach {inside[0][0]}{_aside(outside)}"
        return Diagnosis(tuple(each.rank for each in outside), predicate, inside[0][0])
    if len(inside) > 1:
        rare, usual = inside[-1][0], inside[0][0]
        ranks = tuple(rank for rank, name in sorted(where.items()) if name == rare)
        return Diagnosis(ranks, f"{'is' if len(ranks) == 1 else 'are'} in {rare}, others in {usual}", usual)
    keys = collections.Counter(each.key for each in snapshots).most_common()
    rare_key = keys[-1][0] if len(keys) > 1 and keys[-1][1] < keys[0][1] else None
    odd = [each for each in snapshots if rare_key is None or each.key == rare_key]
    ranks = tuple(sorted(each.rank for each in odd))
    return Diagnosis(ranks, _common_activity(odd), inside[0][0] if inside else "")


def _common_activity(ranks: Sequence[Snapshot]) -> str:
    """The activity of these ranks as a predicate; where they differ, with the ranks of each."""
    told: dict[str, list[int]] = {}
    for each in ranks:
        told.setdefault(activity(each), []).append(each.rank)
    if len(told) > 1:
        shown = [f"{numbered('rank', found)} {text}" for text, found in list(told.items())[:_ACTIVITIES_TOLD]]
        return f"differ: {'; '.join(shown)}"
    return ("" if len(ranks) == 1 else "do the same: each ") + next(iter(told))


def _aside(missing: Sequence[Snapshot]) -> str:
    """The activity of the missing ranks, if it is the same for all."""
    told = {activity(each) for each in missing}
    if len(told) > 1:
        return ""
    return f"; {'it' if len(missing) == 1 else 'each'} {told.pop()}"


def _contains(stack: Sequence[Frame], file: str, function: str) -> bool:
    return any(re.search(file, frame.file) and re.fullmatch(function, frame.function) for frame in stack)


def _at(predicate: str, snapshot: Snapshot) -> str:
    """The predicate with the innermost line of the user's own code."""
    frame = user_frame(snapshot.main)
    return f"{predicate} at {frame.place}" if frame else predicate


def user_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is neither of a library nor of Python itself; the innermost one if there is none."""
    return next((frame for frame in stack if not _LIBRARY.search(frame.file)), stack[0] if stack else None)


# Files whose frames only lead from one frame to the next: of imports, threads and processes that Python starts.
_MACHINERY: Final = (
    re.compile(r"^<frozen importlib\._bootstrap_external>$"),
    re.compile(r"(^|/)python3\.\d+/multiprocessing/(process|popen_\w+|context|spawn)\.py$"),
)
_GROUPS: Final = 8  # of equal stacks that are printed
_FRAMES: Final = 16  # of one stack that are printed
_DATA_GROUPS: Final = 32  # of equal stacks in a report for programs
_THREADS: Final = 2  # other threads of a group's first rank


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """The report for people, made of the result of `to_dict`: the cause, and the first groups of equal stacks."""
    groups = report["groups"]
    result = [report["cause"] or "no rank runs"]
    for group in groups[:_GROUPS]:
        result += [group["heading"], *group["lines"]]
    left = [rank for group in groups[_GROUPS:] for rank in group["ranks"]] + report["left"]
    if left:
        result.append(f"other stacks of {numbered('rank', left)} are left out")
    if report["silent"]:
        result.append(f"no stacks from {', '.join(report['silent'][:_GROUPS])}")
    return result


def to_dict(snapshots: Sequence[Snapshot], diagnosis: Diagnosis, silent: Sequence[str]) -> dict[str, Any]:
    """The report for programs: the cause, and each stack with the ranks that share it, the odd ones first.

    ``silent`` are the pods that sent no stacks.
    """
    groups = odd_first(snapshots, diagnosis)
    return {
        "cause": diagnosis.sentence(),
        "ranks": list(diagnosis.ranks),
        "groups": [
            {
                "ranks": [each.rank for each in group],
                "heading": _heading(group),
                "lines": stack_lines(group[0]),
                "snapshot": group[0].to_dict(),
            }
            for group in groups[:_DATA_GROUPS]
        ],
        "left": [each.rank for group in groups[_DATA_GROUPS:] for each in group],
        "silent": list(silent),
    }


def stack_lines(snapshot: Snapshot) -> list[str]:
    """The stack of a rank, innermost call first, with the processes that it started."""
    result = _indented(snapshot.main) or ["  no Python stack"]
    for thread in snapshot.threads[:_THREADS] if not in_collective(snapshot) else ():
        result += ["  another thread:", *_indented(thread, "  ")]
    for worker in snapshot.workers[:1]:
        result += ["  a process that it started:", *_indented(worker, "  ")]
    return result


def _heading(group: Sequence[Snapshot]) -> str:
    first = group[0]
    place = f" in {first.pod_name or f'pod {first.pod}'}" if len({each.pod for each in group}) == 1 else ""
    node = f" on {first.node}" if place and first.node else ""
    steps = {each.step for each in group if each.step >= 0}
    step = f", step {min(steps)}" if len(steps) == 1 else f", steps {min(steps)} to {max(steps)}" if steps else ""
    idle = f", no progress for {min(each.idle for each in group):.0f} s" if first.idle else ""
    does = activity(first) if len(group) == 1 else f"each {activity(first)}"
    return f"{numbered('rank', (each.rank for each in group))}{place}{node}{step}{idle}: {does}"


def _indented(stack: Sequence[Frame], indent: str = "") -> list[str]:
    """The innermost frames without Python's own machinery, and the user's own one if it is further out."""
    kept = [frame for frame in stack if not any(file.search(frame.file) for file in _MACHINERY)] or list(stack)
    shown = [f"{indent}  {frame}" for frame in kept[:_FRAMES]]
    own = user_frame(stack)
    if own and own not in kept[:_FRAMES]:
        shown += [f"{indent}  …", f"{indent}  {own}"]
    return shown
