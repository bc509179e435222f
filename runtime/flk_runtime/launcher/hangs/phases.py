"""How long a job may make no progress in each phase: as the user says, or as the job's own history shows.

`PHASES` is the one table of phases. Without a hang timeout of the user, a phase has a limit of its own. When the job
has shown how long it is silent in a phase before it goes on, the limit is a multiple of the longest such silence, and
never less than the table says. The leader keeps what it has learned for all attempts, also in the record of the job.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from flk_runtime.contract.hang_timeout import ALL
from flk_runtime.contract.record import NO_SILENCES, Silences
from flk_runtime.launcher.hangs.status import RankStatus
from flk_runtime.shared.progress import Phase, ProgressPage

CPU_PATIENCE: Final = 4  # with a limit of 8 minutes a little more than torch's 30 minutes for gloo
_ENOUGH: Final = 100  # times that the job went on in a phase before the limit becomes less than the default


class Row(NamedTuple):
    """A phase. Times are in seconds."""

    default: float  # limit, until the job has shown less; it is learned to be more at once
    least: float  # limit that is learned
    factor: float  # by which the longest silence is multiplied
    patience: int = 1  # by which the user's limit of all phases is multiplied: a slow volume is no hang


PHASES: Final = {
    "start": Row(480, 480, 3),  # until the run begins; all of a script without flk's library and without collectives
    "first-step": Row(1800, 480, 3),  # torch compiles, kernels are tuned, datasets are opened
    "step": Row(480, 240, 10),  # below the 10 minutes after which NCCL aborts a rank
    "evaluation": Row(1800, 480, 3),
    "save": Row(480 * CPU_PATIENCE, 480, 3, CPU_PATIENCE),
    "restore": Row(1800, 480, 3),
    "round": Row(480, 480, 3),  # of strategy diloco: rank 0 waits for the other workers
}
_NAMES: Final = {
    Phase.SAVING: "save",
    Phase.RESTORING: "restore",
    Phase.EVALUATING: "evaluation",
    Phase.MEETING: "round",
}


def phase_of(page: ProgressPage) -> str:
    """The phase of the rank with this page, as in `PHASES`."""
    phase = page.phase
    if phase in _NAMES:
        return _NAMES[Phase(phase)]
    if phase == Phase.TRAINING:
        return "step" if page.step_time else "first-step"
    # A script without flk's library trains when it uses collectives.
    return "step" if phase == Phase.STARTING and page.collective_time else "start"


class PhaseLimits:
    """The limits of one job."""

    def __init__(self, timeouts: Mapping[str, float]) -> None:
        """``timeouts`` are the user's limits in seconds, by phase, ALL for the others; 0: nothing there is a hang.

        The limits of phases that are not in it are learned.
        """
        self.timeouts = timeouts
        self.silences: dict[str, Silences] = {}
        """What was learned, by phase. Another thread may read it."""
        self._silence: tuple[str, float] | None = None  # phase, and seconds at the last look

    @property
    def off(self) -> bool:
        """Whether nothing is a hang."""
        return all(self.limit(phase) == math.inf for phase in PHASES)

    def resume(self, former: Mapping[str, Silences]) -> None:
        """Go on with what a former leader has learned. Call it before an attempt starts."""
        self.silences |= former

    def start(self) -> None:
        """Note that an attempt starts."""
        self._silence = None

    def note(self, statuses: Iterable[RankStatus]) -> None:
        """Learn from the status of all ranks. Only a silence counts that ended with progress: others may be hangs."""
        latest = min(statuses, key=lambda status: status.idle, default=None)  # the job is silent when all ranks are
        if latest is None:
            return
        if self._silence and latest.idle < self._silence[1]:
            phase, seconds = self._silence
            longest, times = self.silences.get(phase, NO_SILENCES)
            self.silences[phase] = Silences(max(longest, seconds), times + 1)
        self._silence = (latest.phase, latest.idle)

    def limit(self, phase: str) -> float:
        """Seconds without progress after which a rank in this phase hangs."""
        return self._find(phase)[0]

    def describe(self, phase: str) -> str:
        """The limit of a phase, and where it comes from: ``limit 480 s in phase step, the default``."""
        limit, source = self._find(phase)
        return f"limit {limit:g} s in phase {phase}, {source}"

    def _find(self, phase: str) -> tuple[float, str]:
        row = PHASES.get(phase, PHASES["start"])  # another version of flk may have others
        if phase in self.timeouts:
            return self.timeouts[phase] or math.inf, "from the hang timeout of the phase"
        if ALL in self.timeouts:
            return self.timeouts[ALL] * row.patience or math.inf, "from the hang timeout"
        longest, times = self.silences.get(phase, NO_SILENCES)
        learned = max(row.least, row.factor * longest)
        if learned > row.default or times >= _ENOUGH:
            return learned, f"learned from {longest:.0f} s"
        return row.default, "the default"
