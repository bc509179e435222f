"""Quiet: which states of a job are worth a line, so that a wait of hours prints what changes and nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from flk.jobs.state import State

FIRST_PAUSE: Final = 60.0  # seconds after which a state that was reported before may be reported again
LONGEST_PAUSE: Final = 3600.0  # the pause doubles with each report, up to this


@dataclass
class _Report:
    time: float
    pause: float


class Quiet:
    """Remembers what was reported. States that alternate, as in a restart loop, are reported ever more rarely."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: tuple[str, ...] | None = None
        self._reports: dict[tuple[str, ...], _Report] = {}

    def is_news(self, state: State) -> bool:
        """Return whether the state should be reported. Numbers that count up are no news, nor are longer messages."""
        last_cause = state.attempts[-2].cause if len(state.attempts) > 1 else ""
        key = (state.phase.value, state.reason, last_cause)
        if key == self._current:
            return False
        self._current = key
        now, report = self._clock(), self._reports.get(key)
        if report is None:
            self._reports[key] = _Report(now, FIRST_PAUSE)
            return True
        if now - report.time < report.pause:
            return False
        report.time, report.pause = now, min(2 * report.pause, LONGEST_PAUSE)
        return True
