"""The number of steps between two checkpoints: given, or computed from what a save costs (``auto``)."""

from __future__ import annotations

import math
import sys
import time

COMPUTED = -1  # the value of ``save_every`` and of ``store_every`` where the interval is computed
NODE_MTTF = 30 * 86400.0  # seconds from one failure of a node to its next, before the job has seen any
_TRIAL_STEPS = 10  # between the first saves, which measure the cost
_TRIALS = 2  # the first save costs more than later ones, because it makes the plan
_CHANGE = 1.25  # smaller changes of the interval are ignored


def failure_interval(nodes: int, failures: int, trained: float) -> float:
    """Mean seconds between two failures of a job on ``nodes`` nodes that failed ``failures`` times in ``trained`` s.

    The default, one failure of each node in `NODE_MTTF`, counts as one failure that was seen in that time.
    """
    return (NODE_MTTF / nodes + trained) / (1 + failures)


def save_interval(stopped: float, complete: float, step: float, mttf: float) -> int:
    """Steps between two saves that lose the least time, after Young (1974) and Daly (2006): sqrt(2 * cost * MTTF).

    ``stopped``: seconds that training stops for a save; ``complete``: seconds until it is complete, the least interval;
    ``step``: seconds of a step; ``mttf``: mean seconds between two failures.
    """
    seconds = max(math.sqrt(2 * stopped * mttf), complete)
    return max(1, math.ceil(seconds / max(step, 1e-6)))


def is_passed(every: int, before: int, steps: int) -> bool:
    """Whether a multiple of ``every`` was reached after ``before`` steps, of which one call may do many; 0: never."""
    return every > 0 and steps // every != before // every


class FixedInterval:
    """An interval of so many steps; 0: nothing is ever due."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def is_due(self, before: int, steps: int) -> bool:
        """Whether something is due after ``steps`` steps, of which ``before`` had been done at the last call."""
        return is_passed(self._steps, before, steps)

    def next_after(self, steps: int) -> int:
        """The step after which something is due next, once ``steps`` steps are done."""
        return (steps // self._steps + 1) * self._steps if self._steps else sys.maxsize


class AutoInterval:
    """Measures the saves of one rank and says after which step the next one is due. ``verb`` says what it is about."""

    def __init__(self, steps: int, nodes: int, failures: int, verb: str = "saving") -> None:
        self.next = steps + _TRIAL_STEPS
        self._verb = verb
        self._nodes, self._failures = nodes, failures
        self._saves, self._steps = 0, _TRIAL_STEPS
        self._stopped = self._complete = 0.0
        self._begun: dict[int, float] = {}  # times at which saves began that are not complete

    def is_due(self, before: int, steps: int) -> bool:
        """Whether a save is due after ``steps`` steps."""
        return steps >= self.next

    def next_after(self, steps: int) -> int:
        """The step after which a save is due next."""
        return self.next

    def begin(self, steps: int) -> None:
        """Note that the save after ``steps`` steps begins."""
        self._begun[steps] = time.monotonic()

    def copied(self, stopped: float) -> None:
        """Note that training goes on after the copy, for which it stopped ``stopped`` seconds."""
        self._saves += 1
        self._stopped = stopped

    def completed(self, steps: int) -> None:
        """Note that the save after ``steps`` steps is complete. Another thread may call it."""
        begin = self._begun.get(steps)
        for each in list(self._begun):
            if each <= steps:  # an earlier save that is not complete has failed
                self._begun.pop(each, None)
        if begin is not None:
            self._complete = time.monotonic() - begin

    def choose(self, steps: int, step: float) -> tuple[int, str]:
        """The steps until the next save, and a line about them if they have changed. Only rank 0 calls this."""
        if self._saves < _TRIALS:
            return self._steps, ""
        mttf = failure_interval(self._nodes, self._failures, steps * step)
        chosen = save_interval(self._stopped, self._complete, step, mttf)
        if self._saves > _TRIALS and max(chosen, self._steps) < _CHANGE * min(chosen, self._steps):
            return self._steps, ""
        self._steps = chosen
        return chosen, (
            f"flk: {self._verb} every {chosen:,} steps: a save stops training for {self._stopped:.3f} s and takes "
            f"{self._complete:.1f} s, a step {step:.3f} s, and a failure is expected every {mttf / 3600:,.1f} h"
        )
