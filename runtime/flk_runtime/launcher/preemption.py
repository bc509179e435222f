"""Preemption: when a pod has to stop, all ranks save after the same step and end.

The ranks need no collective in each step for this. They share a progress page with their launcher:

1. A launcher that receives SIGTERM tells the leader, and the leader tells all launchers.
2. Each launcher sets ``hold`` in the pages of its ranks. A rank that reaches a step boundary waits there.
3. Each launcher reports the boundary of its ranks. A rank that does not wait yet stops at the next boundary, so the
   leader knows the furthest step that any rank reaches, and sends it to all launchers as ``target``.
4. Ranks that wait at an earlier boundary go on to ``target``. There all ranks save and end.

If a rank cannot stop at a step boundary, because its script calls neither ``run.step`` nor ``flk.must_stop`` or has
nothing to save, all ranks get SIGTERM instead, so that the script's own handler can save. In both cases the ranks have
the grace period.

This module does no I/O: `leader` calls `Preemption`, and `agent` calls `PodPreemption`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk_runtime.contract.failure import Failure
from flk_runtime.shared.progress import ProgressPage

NO_STEP: Final = -1  # instead of the step to stop at: the ranks get SIGTERM
_SETTLE: Final = 0.05  # seconds from the write of `hold` until every rank that has not read it has written its boundary


@dataclass(frozen=True)
class Boundary:
    """How far a rank has come, read after ``hold`` was set in its page."""

    step: int  # after which it last looked at ``hold``; -1: it never did
    waiting: bool


def agreed_step(ranks: Iterable[Boundary]) -> int:
    """The step after which all ranks stop, or NO_STEP if one of them cannot stop at a step boundary.

    A rank that waits has not begun another step. Any other rank finds ``hold`` at its next boundary.
    """
    steps = [rank.step + (not rank.waiting) if rank.step >= 0 else NO_STEP for rank in ranks]
    return max(steps) if steps and min(steps) >= 0 else NO_STEP


class Preemption:
    """The preemption of an attempt as the leader sees it: which pods have reported, and which have ended."""

    def __init__(self, pods: Iterable[int], cause: Failure) -> None:
        """``pods`` are the pods of the attempt; ``cause`` says which pod has to stop, and why."""
        self._cause = cause
        self._running = set(pods)
        self._silent = set(pods)  # have not reported the boundaries of their ranks
        self._boundaries: list[Boundary] = []
        self._saved: list[int] = []
        self.target: int | None = None
        """The step after which all ranks stop, or NO_STEP; None until it is decided."""

    def add_boundaries(self, pod: int, ranks: Sequence[Boundary]) -> int | None:
        """Add the report of a pod. Returns `target` if this report decides it, else None."""
        if pod not in self._silent:
            return None
        self._silent.discard(pod)
        self._boundaries += ranks
        if self.target is not None or (self._silent and all(each.step >= 0 for each in self._boundaries)):
            return None
        self.target = agreed_step(self._boundaries)
        return self.target

    def add_end(self, pod: int, saved: int | None) -> int | None:
        """Note that all ranks of a pod have ended: ``saved`` is the step after which they saved, None if they did not.

        Returns `target` if this decides it, else None.
        """
        if pod not in self._running:
            return None
        self._running.discard(pod)
        self._saved.append(NO_STEP if saved is None else saved)
        return self.add_boundaries(pod, [Boundary(NO_STEP, False)])

    def lose(self, pod: int) -> bool:
        """Note that the launcher of a pod is gone, and return whether the attempt has to end now.

        Ranks that got SIGTERM may still save on their own. Ranks that save together cannot without this pod's ranks.
        """
        if pod not in self._running:
            return False
        if self.target == NO_STEP:
            self._running.discard(pod)
            return self.over
        self._saved.append(NO_STEP)
        return True

    @property
    def over(self) -> bool:
        """Whether the ranks of all pods have ended."""
        return not self._running

    @property
    def failure(self) -> Failure:
        """Why the attempt ended: which pod had to stop, and whether all ranks saved. Read it when `over` is true."""
        if self.target is None or self.target == NO_STEP:
            return self._cause
        result = f"saved after step {self.target}"
        if min(self._saved, default=NO_STEP) != self.target:
            result = f"not all ranks saved after step {self.target} within the grace period"
        return replace(self._cause, message=f"{self._cause.message}; {result}")


class PodPreemption:
    """A preemption as one launcher sees it: it writes to the progress pages of its ranks, and reads them."""

    def __init__(self, pages: Iterable[ProgressPage], now: float) -> None:
        """Set ``hold`` in the pages. ``now`` is in seconds, as in `boundaries`."""
        self._pages = list(pages)
        self._target: int | None = None
        self.settled_at: float | None = now + _SETTLE
        """When `boundaries` has to be called; None after that call."""
        for page in self._pages:
            page.hold = 1

    def boundaries(self, now: float) -> list[Boundary] | None:
        """The boundaries to report, once, when every rank has found ``hold`` or has written how far it came before.

        A processor may read ``hold`` before its write of the boundary is visible to others. So the boundaries are read
        later.
        """
        if self.settled_at is None or now < self.settled_at:
            return None
        self.settled_at = None
        return [Boundary(page.boundary, bool(page.waiting)) for page in self._pages]

    def stop_at(self, step: int) -> None:
        """Have the ranks save and end after ``step``."""
        self._target = step
        for page in self._pages:
            page.target = step

    def release(self) -> None:
        """Let ranks that wait at a boundary go on."""
        self.settled_at = None
        for page in self._pages:
            page.hold = 0

    def stopped(self, page: ProgressPage) -> bool:
        """Whether the rank with this page has reached the step to stop at, so that it ends because it was told to."""
        return self._target is not None and page.boundary >= self._target

    @property
    def saved(self) -> int | None:
        """The step after which all ranks of this pod have saved and ended; None if they have not."""
        return self._target if all(page.saved == self._target for page in self._pages) else None
