"""Decide whether a job hangs: a pure function of the status of all ranks.

A rank makes progress when it makes a step, calls `flk_runtime.heartbeat`, writes a line of output, or begins or ends a
collective. Two cases need more than that:

- A rank that computes for long without any of these (it evaluates, compiles, reads data) uses CPU time. That counts
  without limit while no other rank waits for it, and CPU_PATIENCE times as long as the limit while one does: an endless
  loop uses CPU time too, and torch's own timeouts end collectives then.
- A rank that waits in a collective may use CPU time (NCCL spins) and write lines (from another thread). Neither counts.

A job hangs when none of its ranks makes progress. One rank that works is enough: in training with collectives, the
others cannot get further than one collective ahead, so a rank that is stuck soon stops them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flk_runtime.launcher.hangs.phases import CPU_PATIENCE
from flk_runtime.launcher.hangs.status import RankStatus

if TYPE_CHECKING:
    from flk_runtime.launcher.hangs.statuses import Statuses


def hangs(statuses: Sequence[RankStatus] | Statuses, limit: Callable[[str], float]) -> bool:
    """Return whether no rank has made progress for the limit of its phase, in seconds. False if there is no rank."""
    awaited = any(status.waits >= limit(status.phase) for status in statuses)
    return bool(statuses) and not any(_progresses(each, limit(each.phase), awaited=awaited) for each in statuses)


def _progresses(status: RankStatus, limit: float, *, awaited: bool) -> bool:
    if status.waits >= limit:
        return status.beat < limit
    if status.idle < limit:
        return True
    return status.cpu_idle < limit and (not awaited or status.idle < CPU_PATIENCE * limit)


def interval(timeouts: Mapping[str, float]) -> float:
    """Seconds between two looks at the ranks, so that a hang is found soon after the shortest of the limits."""
    return min(5.0, max(0.5, min(filter(None, timeouts.values()), default=20.0) / 4))
