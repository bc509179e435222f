"""Goodput: the wall-clock time of the job by cause (training, saving, restarting, lost steps, …), as a `Ledger`.

At each moment the time of the job belongs to exactly one cause of `flk_runtime.contract.record.Goodput`, so that the
causes add up to the time since the start. Only the launcher of pod 0 keeps a ledger. It reads the progress page of its
first rank, which counts the time that the rank spends in each phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flk_runtime.contract.record import SOURCES, Goodput
from flk_runtime.contract.status import Phase
from flk_runtime.shared.progress import ProgressPage


@dataclass(frozen=True)
class _Steps:
    """Steps of one attempt, and the seconds that those after the first one took. The first one is part of starting."""

    first: int
    last: int
    seconds: float


class Ledger:
    """The times of a job. Times are by time.monotonic, except where they are since the epoch."""

    def __init__(self, now: float, epoch: float) -> None:
        """``now`` and ``epoch`` are the same moment: the start of this launcher."""
        self._began, self._epoch = now, epoch
        self._former: Goodput | None = None  # of the launchers before this one
        self._seconds: dict[str, float] = defaultdict(float)  # by cause, until `_since`
        self._steps: list[_Steps] = []  # that were not lost, oldest first
        self._stored = -1  # step of the newest checkpoint in storage that is known; -1: none
        self._since = now
        self._page: ProgressPage | None = None  # of the attempt that runs
        self._waits_for = "waiting"  # the cause while no attempt runs
        self._closed: float | None = None

    def resume(self, former: Goodput) -> None:
        """Add the times that the launchers before this one have recorded."""
        if former.step is not None and former.first_step is not None:
            self._steps = [_Steps(former.first_step, former.step, former.seconds.get("computing", 0.0))]
        self._former = former

    def start_attempt(self, page: ProgressPage, now: float) -> None:
        """Note that an attempt starts, in which the first rank of this pod has this page."""
        self._seconds[self._waits_for] += now - self._since
        self._since, self._page, self._waits_for = now, page, "recovering"

    def end_attempt(self, now: float, *, failed: bool, hung: bool = False) -> None:
        """Note that the attempt has ended in all pods. A step that a failed one has begun is lost."""
        page = self._page
        if page is None:
            return
        spent = _spent(page, self._since, now)
        unfinished = 0.0
        if failed and page.step_time and page.phase != Phase.SAVING:
            unfinished = min(spent["computing"], now - max(page.step_time, page.phase_time))
        spent["computing"] -= unfinished
        spent["hanging" if hung else "lost"] += unfinished
        _add(self._seconds, spent)
        if page.restored >= 0:
            self._lose_after(page.restored)
            if SOURCES[page.restored_from] == "storage":
                self._stored = page.restored
        if page.step_time:
            self._steps.append(_Steps(page.first_step, page.step, spent["computing"]))
        self._stored = max(self._stored, page.stored)
        self._since, self._page = now, None

    def _lose_after(self, step: int) -> None:
        self._steps, lost = _cut(self._steps, step)
        _add(self._seconds, _moved(lost))

    def close(self, now: float, *, failed: bool) -> None:
        """Note that the job has ended: no time is counted after ``now``.

        Of a job that has failed only the steps are kept whose result is in storage: what was in memory ends with it.
        """
        self.end_attempt(now, failed=failed)
        if failed and self._steps:
            self._lose_after(self._stored)
            self._steps = self._steps or [_Steps(0, 0, 0.0)]  # it has told steps, and none is kept
        self._closed = now

    def read(self, now: float) -> Goodput:
        """The times of the job until ``now``."""
        now = min(now, self._closed or now)
        seconds, steps, page, former = self._seconds.copy(), self._steps, self._page, self._former
        if page:
            _add(seconds, _spent(page, self._since, now))
            if page.restored >= 0:  # the script may still correct it
                steps, lost = _cut(steps, page.restored)
                _add(seconds, _moved(lost))
            if page.step_time:
                steps = [*steps, _Steps(page.first_step, page.step, 0.0)]
        else:
            seconds[self._waits_for] += now - self._since
        if former:
            _add(seconds, former.seconds)
            seconds["down"] += max(0.0, self._epoch - former.until)
        return Goodput(
            self._epoch + now - self._began,
            {cause: round(spent, 3) for cause, spent in seconds.items() if spent},
            steps[0].first if steps else None,
            steps[-1].last if steps else None,
        )


def _add(seconds: dict[str, float], more: Mapping[str, float]) -> None:
    for cause, spent in more.items():
        seconds[cause] += spent


def _moved(lost: float) -> dict[str, float]:
    """The change of the times by cause where steps of so many seconds are lost."""
    return {"computing": -lost, "lost": lost}


def _spent(page: ProgressPage, since: float, now: float) -> dict[str, float]:
    """The times by cause of an attempt that has run since ``since``; their sum is ``now - since``."""
    left = now - since
    found: dict[str, float] = defaultdict(float)
    restoring, saving = (page.seconds_in(phase, now) for phase in (Phase.RESTORING, Phase.SAVING))
    started = (page.first_step_time - since if page.step_time else left) - restoring
    for cause, seconds in (("restoring", restoring), ("saving", saving), ("starting", started)):
        found[cause] = min(left, max(0.0, seconds))
        left -= found[cause]
    found["computing"] = left
    return found


def _cut(all_steps: Sequence[_Steps], step: int) -> tuple[list[_Steps], float]:
    """The steps that are kept when training goes on after ``step``, and the seconds of those that are lost.

    The steps of an attempt count as equally long.
    """
    kept, lost = [], 0.0
    for each in all_steps:
        part = each.seconds
        if each.last > each.first:
            part *= min(1.0, max(0.0, (each.last - step) / (each.last - each.first)))
        elif step >= each.last:
            part = 0.0
        lost += part
        if step >= each.first:
            kept.append(replace(each, last=min(each.last, step), seconds=each.seconds - part))
    return kept, lost
