"""A clock that a test moves: hours of waiting pass in seconds, and no thread that works is left behind."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

PATIENCE = 30.0  # real seconds after which the clock moves although a thread still works


class VirtualClock:
    """Seconds that pass only while the main thread waits, and only when all other threads wait too.

    ``monotonic``, ``time`` and ``sleep`` replace the functions of the module ``time``.
    """

    def __init__(self, start: float) -> None:
        self._now = start
        self._changed = threading.Condition()
        self.waiting = 0  # threads that wait for the clock
        self.expected = 0  # threads that must wait before the clock may move
        self.pending = 0  # messages that are on their way; the clock does not move before they have arrived

    def time(self) -> float:
        """Return the virtual time in seconds since the epoch."""
        return self._now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        """Wait in virtual time. The main thread moves the clock."""
        if threading.current_thread() is threading.main_thread():
            self.advance(seconds)
        else:
            self.wait_until(self._now + seconds)

    def wait_until(self, moment: float) -> None:
        """Wait in another thread than the main one until the clock shows ``moment``."""
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._now >= moment)
            self.waiting -= 1

    def add_pending(self, count: int) -> None:
        """Count a message that was sent (1) or has arrived (-1)."""
        with self._changed:
            self.pending += count
            self._changed.notify_all()

    def advance(self, seconds: float) -> None:
        """Move the clock when as many threads wait as are expected to."""
        until = time.monotonic() + PATIENCE
        with self._changed:
            while (self.waiting < self.expected or self.pending > 0) and time.monotonic() < until:
                self._changed.wait(0.05)
            self._now += seconds
            self._changed.notify_all()

    def queue(self) -> Any:
        """Return a replacement for the module ``queue``, in which a get that would wait moves the clock instead."""
        clock = self

        class Queue(queue.SimpleQueue):  # type: ignore[type-arg]
            def get(self, block: bool = True, timeout: float | None = None) -> Any:
                try:
                    return super().get(block=False)
                except queue.Empty:
                    clock.advance(timeout or 0.0)
                return super().get(block=False)

        class Module:
            SimpleQueue = Queue
            Empty = queue.Empty

        return Module
