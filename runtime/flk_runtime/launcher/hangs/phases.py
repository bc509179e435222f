"""When a job hangs: how long it may make no progress in each phase, and whether its ranks have made none for longer.

A rank makes progress when it makes a step, calls `flk_runtime.heartbeat`, writes a line of output, or begins or ends a
collective. Two cases need more than that:

- A rank that computes for long without any of these (it evaluates, compiles, reads data) uses CPU time. That counts
  without limit while no other rank waits for it, and CPU_PATIENCE times as long as the limit while one does: an endless
  loop uses CPU time too, and torch's own timeouts end collectives then.
- A rank that waits in a collective may use CPU time (NCCL spins) and write lines (from another thread). Neither counts.

A job hangs when none of its ranks makes progress. One rank that works is enough: in training with collectives, the
others cannot get further than one collective ahead, so a rank that is stuck soon stops them all.

`LIMITS` has the limit of each phase where the user gives none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from flk_runtime.contract.options import ALL_PHASES
from flk_runtime.contract.status import Phase, RankStatus

CPU_PATIENCE: Final = 4  # with a limit of 8 minutes a little more than torch's 30 minutes for gloo


class Row(NamedTuple):
    """A phase. Times are in seconds."""

    default: float  # limit
    patience: int = 1  # by which the user's limit of all phases is multiplied: a slow volume is no hang


LIMITS: Final = {
    Phase.STARTING: Row(480),  # all of a script without flk's library and without collectives
    Phase.RENDEZVOUS: Row(480),
    Phase.FIRST_STEP: Row(1800),
    Phase.TRAINING: Row(480),  # below the 10 minutes after which NCCL aborts a rank
    Phase.EVALUATING: Row(1800),
    Phase.SAVING: Row(480 * CPU_PATIENCE, CPU_PATIENCE),
    Phase.RESTORING: Row(1800),
    Phase.MEETING: Row(480),
}


class PhaseLimits:
    """The limits of one job."""

    def __init__(self, timeouts: Mapping[str, float]) -> None:
        """``timeouts`` are the user's limits in seconds, by phase, ALL for the others; 0: nothing there is a hang."""
        self.timeouts = timeouts

    @property
    def off(self) -> bool:
        """Whether nothing is a hang."""
        return all(self.limit(phase) == math.inf for phase in Phase)

    def limit(self, phase: Phase) -> float:
        """Seconds without progress after which a rank in this phase hangs."""
        return self._find(phase)[0]

    def describe(self, phase: Phase) -> str:
        """The limit of a phase, and where it comes from: ``limit 480 s in phase step, the default``."""
        limit, source = self._find(phase)
        return f"limit {limit:g} s in phase {phase}, {source}"

    def _find(self, phase: Phase) -> tuple[float, str]:
        row = LIMITS[phase]
        if phase in self.timeouts:
            return self.timeouts[phase] or math.inf, "from the hang timeout of the phase"
        if ALL_PHASES in self.timeouts:
            return self.timeouts[ALL_PHASES] * row.patience or math.inf, "from the hang timeout"
        return row.default, "the default"


def hangs(statuses: Sequence[RankStatus], limit: Callable[[Phase], float]) -> bool:
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
