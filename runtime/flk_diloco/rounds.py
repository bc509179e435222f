"""Rounds: which workers take part in each round of the outer optimizer, and when a round is complete. Without sockets.

The hub keeps no parameters. A worker that joins gets them from another worker, and then the averages of later rounds;
it takes part from the next boundary between two rounds on. So a hub that starts anew loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    versions: list[int]  # of the fragments, as far as it has received them
    digest: str  # of its parameters before its first round; empty after it
    active: bool = False  # rounds wait for it
    behind: bool = False  # it needs another worker's parameters
    synced: bool = False  # it has received them while the others went on, and takes part from the next round on


@dataclass
class _Round:
    """A round that has begun: the version that it makes, and the contributions so far by worker."""

    version: int
    began: float
    contributions: dict[int, bytes | bytearray] = field(default_factory=dict)


class Rounds:
    """The rounds and the workers of a hub. Not thread-safe. ``log`` takes a line; callers pass times in seconds."""

    def __init__(
        self, limits: Limits, sizes: Sequence[int], dtype: str, now: float, log: Callable[[str], None]
    ) -> None:
        """``sizes`` are the numbers of elements of the fragments, ``dtype`` is the dtype of outer gradients."""
        self._limits, self._sizes, self._dtype, self._log = limits, list(sizes), dtype, log
        self._members: dict[int, Member] = {}  # by worker
        self._current = [0] * len(sizes)  # versions of the fragments that rounds have made
        self._last: list[bytes] = [b""] * len(sizes)  # the averages of the latest rounds
        self._feedback = [ErrorFeedback(dtype, size) for size in sizes]
        self._open: dict[int, _Round] = {}  # by fragment
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
        missing = [current - own for current, own in zip(self._current, member.versions, strict=True)]
        if not self.active:
            self._found(now)
            return
        behind = [fragment for fragment, count in enumerate(missing) if count]
        latest = all(missing[fragment] == 1 and self._last[fragment] for fragment in behind)
        if latest and member.digest in ("", self._digest):
            for fragment in behind:
                self._send_result(member, fragment, joins=False)
            self._activate(member)
        else:
            self._log(f"worker {member.worker} is behind: it takes part after it has caught up")
            member.behind = True
        self._ask_donor(now)

    def leave(self, worker: int, now: float, reason: str) -> None:
        """Remove a worker that is lost, or has finished (``reason`` is empty)."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        self.left += not reason
        others = f"; {len(self.active)} of {self._limits.workers} go on"
        self._log(f"worker {worker} is lost: {reason}{others}" if reason else f"worker {worker} has finished")
        if self._donor == worker:
            self._donor = None
        if not self.active:
            self._idle_since = now
            self._open.clear()
            self._found(now)
        for fragment in list(self._open):
            self._finish_if_complete(fragment, now)
        self._ask_donor(now)

    def contribute(self, worker: int, fragment: int, version: int, data: bytes | bytearray, now: float) -> None:
        """Add a worker's outer gradient to the round that makes ``version`` of ``fragment``."""
        member = self._members.get(worker)
        if member is None or not member.active or member.behind or version != self._current[fragment] + 1:
            return  # of a round that is over; the worker gets its result, or catches up
        size = compression.encoded_size(self._dtype, self._sizes[fragment])
        if len(data) != size:
            raise ConnectionError(f"worker {worker} sent {len(data)} bytes in place of {size}")
        opened = self._open.setdefault(fragment, _Round(version, now))
        opened.contributions[worker] = data
        self._finish_if_complete(fragment, now)

    def give(self, worker: int, versions: list[int], data: bytes | bytearray) -> None:
        """Pass on the parameters of the worker that was asked for them to the workers that wait for them."""
        if worker != self._donor:
            return
        self._donor = None
        for member in [each for each in self._members.values() if each.behind]:
            member.versions, member.behind, member.synced = list(versions), False, not member.active
            member.send(CatchUp(versions, len(self.active), member.active), bytes(data))
            for fragment, current in enumerate(self._current):
                if current > versions[fragment]:
                    self._send_result(member, fragment, joins=False)

    def tick(self, now: float) -> list[int]:
        """Begin without workers that have not come, and return the workers that are too late for a round."""
        if not self.active:
            self._found(now)
        late: set[int] = set()
        for opened in self._open.values():
            if now - opened.began >= self._limits.timeout:
                late |= {member.worker for member in self.active} - opened.contributions.keys()
        return sorted(late)

    def _found(self, now: float) -> None:
        """Begin with the connected workers, if all are connected or the others have had enough time."""
        since = now if self._idle_since is None else self._idle_since
        here = list(self._members.values())
        if not here or (len(here) < self._limits.workers and now - since < self._limits.wait):
            return
        best = max(here, key=lambda member: (sum(member.versions), -member.worker))
        if best.versions != self._current:  # the hub is new, or no worker that was further has come back
            self._current, self._last = list(best.versions), [b""] * len(self._sizes)
        self._digest, self._idle_since = best.digest, None
        self._log(f"begin with {len(here)} of {self._limits.workers} workers, at round {max(self._current)}")
        for member in here:  # rounds wait for workers that are behind, too: none has gone on yet
            member.active, member.synced = True, False
            member.behind = (member.versions, member.digest) != (best.versions, best.digest)
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
            self._open.clear()
            self._found(now)

    def _finish_if_complete(self, fragment: int, now: float) -> None:
        opened, active = self._open[fragment], self.active
        if not active or not opened.contributions.keys() >= {member.worker for member in active}:
            return
        del self._open[fragment]
        total = torch.zeros(self._sizes[fragment])
        for worker in sorted(opened.contributions):  # in this order, so that runs are equal to the bit
            total += compression.decode(opened.contributions[worker], self._dtype, self._sizes[fragment])
        self._last[fragment] = self._feedback[fragment].encode(total / len(opened.contributions))
        self._current[fragment], self._digest = opened.version, ""
        joining = [member for member in self._members.values() if member.synced]
        for member in active:
            self._send_result(member, fragment, joins=False)
        for member in joining:
            member.active, member.synced = True, False
            self._log(f"worker {member.worker} has joined at round {opened.version}")
            self._send_result(member, fragment, joins=True)

    def _send_result(self, member: Member, fragment: int, *, joins: bool) -> None:
        member.versions[fragment] = self._current[fragment]
        result = Result(fragment, self._current[fragment], len(self.active), joins)
        member.send(result, self._last[fragment])
