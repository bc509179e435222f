"""Find ranks that are slower than the others.

In synchronous training all ranks make the same number of steps in the same time: the fast ones wait for the slow one in
collectives. So a rank's own work is the share of time in which no collective of it is pending, and a straggler is a
rank that works much more of the time than the median rank does.
"""

from __future__ import annotations

import statistics
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final

from flk_runtime.launcher.hangs.status import RankStatus

_SAMPLES: Final = 40  # that a rank needs in the window: the share is then known to about 0.08
_LOOKS: Final = 4  # that are kept of a window
_EXCESS: Final = 0.2  # by which the share must exceed the median's; without it, ranks that only wait would be compared


class Stragglers:
    """Compares the ranks over a sliding window of time."""

    def __init__(self, factor: float, window: float) -> None:
        """A rank counts as slow if it works ``factor`` times as long as the median in the last ``window`` seconds."""
        self._factor = factor
        self._window = window
        self._seen: deque[tuple[float, array[int]]] = deque()  # rank, samples and pending ones, of each rank
        self.work: dict[int, float] = {}
        """The share of the window in which each rank works, of those that are known well enough."""

    def update(self, now: float, statuses: Iterable[RankStatus]) -> dict[int, float]:
        """Add the statuses of all ranks at the time ``now``. Returns the slow ranks, each with its factor."""
        seen = array("q")
        for status in statuses:
            seen.extend((status.rank, status.samples, status.pending))
        if self._seen and self._seen[0][1][::3] != seen[::3]:
            self._seen.clear()  # other ranks than before
        if not self._seen or now - self._seen[-1][0] >= self._window / _LOOKS:
            self._seen.append((now, seen))
        while len(self._seen) > 1 and now - self._seen[1][0] >= self._window:
            self._seen.popleft()
        since, first = self._seen[0]
        self.work = work = {}
        for place in range(0, len(seen), 3):  # without objects for each rank, of which there may be many
            samples, pending = seen[place + 1] - first[place + 1], seen[place + 2] - first[place + 2]
            if samples >= _SAMPLES:
                work[seen[place]] = 1 - pending / samples
        if now - since < self._window or len(work) < 2 or len(work) < len(seen) // 3:
            return {}
        usual = statistics.median_low(work.values())
        return {
            rank: round(share / max(usual, 0.01), 1)
            for rank, share in work.items()
            if share >= self._factor * usual and share - usual >= _EXCESS
        }

    def clear(self) -> None:
        """Forget everything: a new attempt begins."""
        self._seen.clear()
        self.work = {}
