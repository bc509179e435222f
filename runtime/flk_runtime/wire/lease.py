"""Lease: how long the other end of a connection may be silent before it counts as lost. Backoff: when to try again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from flk_runtime.contract import user_env


class Lease(float):
    """A time in seconds. An end that has nothing to send says that it is there three times in it."""

    __slots__ = ()

    @property
    def interval(self) -> float:
        """Seconds without another message after which an end says that it is there."""
        return self / 3

    def silence(self, heard: float, now: float) -> str:
        """Say that the other end, last heard of at ``heard``, has been silent for too long; empty if it has not."""
        return f"it was silent for {now - heard:.0f} s" if now - heard > self else ""


LEASE = Lease(user_env.LEASE.default)


# Without a state: threads of a rank draw too, and the script's own numbers must not depend on when they do.
_RANDOM: Final = random.SystemRandom()


class Backoff:
    """Delays that double, with a random part, so that many clients of one server do not come at the same moments."""

    def __init__(self, first: float, longest: float, uniform: Callable[[], float] = _RANDOM.random) -> None:
        """``first`` and ``longest`` are in seconds, before the random part. ``uniform`` returns numbers from 0 to 1."""
        self._first, self._longest, self._uniform = first, longest, uniform
        self._delay = first

    def next(self) -> float:
        """The seconds until the next try: half to one and a half of the delay without the random part."""
        delay, self._delay = self._delay, min(2 * self._delay, self._longest)
        return delay * (0.5 + self._uniform())

    def reset(self) -> None:
        """Begin anew, since the other end was reached."""
        self._delay = self._first
