"""Waiting: lines for people while ranks wait for each other."""

from __future__ import annotations

import sys
import time

_FIRST, _EVERY = 10.0, 30.0  # seconds until the first line, and between two later ones


class Waiting:
    """When to say that a rank waits: after 10 seconds, and then every 30 seconds."""

    def __init__(self, deadline: float) -> None:
        """``deadline`` is when the rank gives up, by time.monotonic."""
        self._began = time.monotonic()
        self._deadline = deadline
        self._next = self._began + _FIRST

    @property
    def seconds(self) -> float:
        """How long the rank has waited."""
        return time.monotonic() - self._began

    def is_due(self) -> bool:
        """Return whether it is time for a line."""
        return time.monotonic() >= self._next

    def say(self, text: str) -> None:
        """Print a line to stderr, with the time that is left."""
        now = time.monotonic()
        self._next = now + _EVERY
        print(f"flk: {text}; giving up in {max(0.0, self._deadline - now):.0f} s", file=sys.stderr, flush=True)
