"""Rounds: which workers take part in each round of the outer optimizer, and when a round is complete. Without sockets.

The hub keeps no parameters. A worker that joins gets them from another worker, and then the averages of later rounds;
it takes part from the next boundary between two rounds on. So a hub that starts anew loses only the rounding error
of its last average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flk_diloco import compression
from flk_diloco.compression import ErrorFeedback
from flk_diloco.messages import Begin, CatchUp, FromHub, Give, Result

Send = Callable[[FromHub, bytes], None]


@dataclass(frozen=True)
class Limits:
    """The limits of `Rounds`: times to wait in seconds, and the number of workers that begin together."""

    workers: int
    wait: float
    timeout: float


@dataclass
class Member:
    """A connected worker."""

    worker: int
    send: Send
    version: int  # of its parameters, as far as it has received averages
    digest: str  # of its parameters before its first round; empty after it
    active: bool = False  # rounds wait for it
    behind: bool = False  # it needs another worker's parameters
    synced: bool = False  # it has received them while the others went on, and takes part from the next round on


class Rounds:
    """The rounds and the workers of a hub. Not thread-safe. ``log`` takes a line; callers pass times in seconds."""

    def __init__(self, limits: Limits, size: int, dtype: str, now: float, log: Callable[[str], None]) -> None:
        """``size`` is the number of parameters, ``dtype`` is the dtype of outer gradients."""
        self._limits, self._size, self._dtype, self._log = limits, size, dtype, log
        self._members: dict[int, Member] = {}  # by worker
        self._current = 0  # the version that rounds have made
        self._last = b""  # the average of the latest round
        self._feedback = ErrorFeedback(dtype, size)
        self._began = 0.0  # when the round began that is open, if it has contributions
        self._contributions: dict[int, bytes | bytearray] = {}  # to this round, by worker
        self._idle_since: float | None = now  # no worker has been active since then
        self._digest = ""  # of the parameters with which they began; empty after the first round
        self._donor: int | None = None  # the worker that was asked for its parameters
        self.left = 0  # workers that have said that they have finished

    @property
    def active(self) -> list[Member]:
        """The workers that take part in rounds, by their number."""
        return [self._members[worker] for worker in sorted(self._members) if self._members[worker].active]

    def join(self, member: Member, now: float) -> None:
        """Add a worker that has connected, in place of an earlier connection of the same worker."""
        self._members[member.worker] = member
        if self._donor == member.worker:  # what it was giving may be lost with its former connection
            self._donor = None
        if not self.active:
            self._found(now)
            return
        missing = self._current - member.version
        if (not missing or (missing == 1 and self._last)) and member.digest in ("", self._digest):
            if missing:
                self._send_result(member, joins=False)
            self._activate(member)
        else:
            self._log(f"worker {member.worker} is behind: it takes part after it has caught up")
            member.behind = True
        self._ask_donor(now)

    def leave(self, worker: int, now: float, reason: str) -> None:
        """Remove a worker that is lost, or has finished (``reason`` is empty)."""
        if self._members.pop(worker, None) is None:
            return
        self.left += not reason
        others = f"; {len(self.active)} of {self._limits.workers} go on"
        self._log(f"worker {worker} is lost: {reason}{others}" if reason else f"worker {worker} has finished")
        if self._donor == worker:
            self._donor = None
        if not self.active:
            self._idle_since = now
            self._contributions.clear()
            self._found(now)
        self._finish_if_complete()
        self._ask_donor(now)

    def contribute(self, worker: int, version: int, data: bytes | bytearray, now: float) -> None:
        """Add a worker's outer gradient to the round that makes ``version``."""
        member = self._members.get(worker)
        if member is None or not member.active or member.behind or version != self._current + 1:
            return  # of a round that is over; the worker gets its result, or catches up
        size = compression.encoded_size(self._dtype, self._size)
        if len(data) != size:
            raise ConnectionError(f"worker {worker} sent {len(data)} bytes in place of {size}")
        if not self._contributions:
            self._began = now
        self._contributions[worker] = data
        self._finish_if_complete()

    def give(self, worker: int, version: int, data: bytes | bytearray) -> None:
        """Pass on the parameters of the worker that was asked for them to the workers that wait for them."""
        if worker != self._donor:
            return
        self._donor = None
        for member in [member for member in self._members.values() if member.behind]:
            member.version, member.behind, member.synced = version, False, not member.active
            member.send(CatchUp(version, len(self.active), member.active), bytes(data))
            if self._current > version:
                self._send_result(member, joins=False)

    def tick(self, now: float) -> list[int]:
        """Begin without workers that have not come, and return the workers that are too late for a round."""
        if not self.active:
            self._found(now)
        if not self._contributions or now - self._began < self._limits.timeout:
            return []
        return sorted({member.worker for member in self.active} - self._contributions.keys())

    def _found(self, now: float) -> None:
        """Begin with the connected workers, if all are connected or the others have had enough time."""
        since = now if self._idle_since is None else self._idle_since
        here = list(self._members.values())
        if not here or (len(here) < self._limits.workers and now - since < self._limits.wait):
            return
        best = max(here, key=lambda member: (member.version, -member.worker))
        if best.version != self._current:  # the hub is new, or no worker that was further has come back
            self._current, self._last = best.version, b""
            self._feedback.residual.zero_()  # it is of an average that is in no parameters
        self._digest, self._idle_since = best.digest, None
        self._log(f"begin with {len(here)} of {self._limits.workers} workers, at round {self._current}")
        for member in here:  # rounds wait for workers that are behind, too: none has gone on yet
            member.active, member.synced = True, False
            member.behind = (member.version, member.digest) != (best.version, best.digest)
        for member in here:
            if not member.behind:
                self._activate(member)
        self._ask_donor(now)

    def _activate(self, member: Member) -> None:
        member.active = True
        member.send(Begin(len(self.active)), b"")

    def _ask_donor(self, now: float) -> None:
        """Ask a worker that takes part for its parameters, if another one needs them."""
        if self._donor is not None or not any(member.behind for member in self._members.values()):
            return
        donors = [member for member in self.active if not member.behind]
        if donors:
            self._donor = donors[0].worker
            donors[0].send(Give(), b"")
        elif self.active:  # the workers with the parameters were lost before they gave them
            for member in self.active:
                member.active = False
            self._idle_since = now
            self._contributions.clear()
            self._found(now)

    def _finish_if_complete(self) -> None:
        given, active = self._contributions, self.active
        if not active or not given.keys() >= {member.worker for member in active}:
            return
        total = torch.zeros(self._size)
        for worker in sorted(given):  # in this order, so that runs are equal to the bit
            total += compression.decode(given[worker], self._dtype, self._size)
        self._last = self._feedback.encode(total / len(given))
        self._current, self._digest, self._contributions = self._current + 1, "", {}
        joining = [member for member in self._members.values() if member.synced]
        for member in active:
            self._send_result(member, joins=False)
        for member in joining:
            member.active, member.synced = True, False
            self._log(f"worker {member.worker} has joined at round {self._current}")
            self._send_result(member, joins=True)

    def _send_result(self, member: Member, *, joins: bool) -> None:
        member.version = self._current
        member.send(Result(self._current, len(self.active), joins), self._last)
