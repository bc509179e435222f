"""Poller: reads the logs of many pods in turn with a few connections, where there are too many pods to follow each."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from flk.jobs.logs.reader import PodLog

THREADS: Final = 8
ROUND: Final = 15.0  # seconds between two requests for one log, at least
RATE: Final = 40.0  # requests a second of all threads together, at most, while the job runs
_LAST_ROUND: Final = 1.0  # seconds between two requests for one log when the job has ended


class Poller:
    """Some threads that read the logs in turn until each is complete or ``closed`` is set."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, PodLog]] = deque()  # with the time of the next request
        self._hurry = False
        self._next = 0.0  # time of the next request of all threads
        for number in range(THREADS):
            threading.Thread(target=self._run, daemon=True, name=f"flk-poll-{number}").start()

    def add(self, log: PodLog) -> None:
        """Read this log, too."""
        with self._changed:
            self._waiting.appendleft((0.0, log))
            self._changed.notify()

    def hurry(self) -> None:
        """Read all logs at once: the job has ended, and only the last lines are missing."""
        with self._changed:
            if not self._hurry:
                self._hurry = True
                self._waiting = deque((0.0, log) for _, log in self._waiting)
                self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed.is_set():
            log = self._take()
            if log is None:
                continue
            log.read(follow=False)
            with self._changed:
                if not log.complete:
                    pause = _LAST_ROUND if self._hurry else ROUND
                    self._waiting.append((time.monotonic() + pause, log))
                    self._changed.notify()

    def _take(self) -> PodLog | None:
        """Return the log whose turn it is; None after a pause, if there is none."""
        with self._changed:
            now = time.monotonic()
            if not self._waiting:
                self._changed.wait(0.5)
                return None
            due = max(self._waiting[0][0], 0.0 if self._hurry else self._next)
            if now < due:
                self._changed.wait(min(0.5, due - now))
                return None
            self._next = max(now, self._next) + 1 / RATE
            return self._waiting.popleft()[1]
