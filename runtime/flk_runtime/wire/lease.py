"""Lease: how long the other end of a connection may be silent before it counts as lost."""

from __future__ import annotations

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
