"""Print snapshots of all ranks: equal stacks once, the odd ones first, cut to a bounded size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flk_runtime.contract.ranges import numbered
from flk_runtime.launcher.hangs.diagnosis import Diagnosis, activity, in_collective, odd_first, user_frame
from flk_runtime.launcher.hangs.snapshot import Frame, Snapshot

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
