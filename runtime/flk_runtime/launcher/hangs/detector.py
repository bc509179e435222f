"""The leader's side of hangs and slow ranks: watches the reports of all pods, and gathers the stacks of all ranks.

A rank makes progress when it makes a step, calls `flk_runtime.heartbeat`, writes a line of output, or begins or ends a
collective. Two cases need more than that:

- A rank that computes for long without any of these (it evaluates, compiles, reads data) uses CPU time. That counts
  without limit while no other rank waits for it, and CPU_PATIENCE times as long as the limit while one does: an endless
  loop uses CPU time too, and torch's own timeouts end collectives then.
- A rank that waits in a collective may use CPU time (NCCL spins) and write lines (from another thread). Neither counts.

A job hangs when none of its ranks makes progress. One rank that works is enough: in training with collectives, the
others cannot get further than one collective ahead, so a rank that is stuck soon stops them all.
"""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import SlowRank, Standstill
from flk_runtime.contract.status import Phase, Ranks, RankStatus, of_all
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.hangs.diagnosis import diagnose, lines_of, stack_lines, to_dict
from flk_runtime.launcher.hangs.snapshot import Snapshot

CPU_PATIENCE: Final = 4  # with a limit of 8 minutes a little more than torch's 30 minutes for gloo


LIMITS: Final = {  # seconds
    Phase.STARTING: 480.0,  # all of a script without flk's library and without collectives
    Phase.RENDEZVOUS: 480.0,
    Phase.FIRST_STEP: 1800.0,
    Phase.TRAINING: 480.0,  # below the 10 minutes after which NCCL aborts a rank
    Phase.EVALUATING: 1800.0,
    Phase.SAVING: 480.0 * CPU_PATIENCE,
    Phase.RESTORING: 1800.0,
    Phase.MEETING: 480.0,
}


def limit_of(phase: Phase, timeout: float | None) -> float:
    """Seconds without progress after which a rank in this phase hangs.

    ``timeout`` is the user's limit in seconds, in place of `LIMITS`; 0: nothing is a hang.
    """
    if timeout is None:
        return LIMITS[phase]
    return (timeout or math.inf) * (CPU_PATIENCE if phase is Phase.SAVING else 1)  # a slow volume is no hang


def hangs(statuses: Sequence[RankStatus], limit: Callable[[Phase], float]) -> bool:
    """Return whether no rank has made progress for the limit of its phase, in seconds. False if there is no rank."""
    awaited = any(status.waits >= limit(status.phase) for status in statuses)
    return bool(statuses) and not any(_progresses(each, limit(each.phase), awaited=awaited) for each in statuses)


def _progresses(status: RankStatus, limit: float, *, awaited: bool) -> bool:
    if status.waits >= limit:
        return status.beat < limit
    if status.idle < limit:
        return True
    return status.cpu_idle < limit and (not awaited or status.idle < CPU_PATIENCE * limit)


def interval(timeout: float | None) -> float:
    """Seconds between two looks at the ranks, so that a hang is found soon after the limit."""
    return min(5.0, max(0.5, (timeout or 20.0) / 4))


_REPORT_TIMEOUT: Final = 12.0  # seconds to wait for the stacks of all pods
_AGAIN: Final = 60.0  # seconds between two looks at the stacks while no rank makes progress
STANDSTILL: Final = 30.0  # seconds without progress after which the ranks are looked at
_SLOW_LIMIT: Final = 8  # ranks in the list
_STEPS: Final = 60  # that the window holds at least: steps may differ in length, as sequences do
_LOOKS: Final = 4  # that are kept of a window
_FACTOR: Final = 1.2  # a rank that works so many times as long as the median is slow
_EXCESS: Final = 0.1  # by which the share must exceed the median's; without it, ranks that only wait would be compared
_SURE: Final = 5.0  # standard errors by which it must: by chance, one rank in millions differs so much
_STAYS: Final = 0.5  # part of these limits above which a slow rank stays slow, so that it is not told again and again
_DATA: Final = 0.1  # a slow rank whose share of waiting for data exceeds the median's by so much is slow by its data

Asker = tuple[int, str]  # index of a pod, and a name that is its own business


@dataclass
class _Collection:
    """Stacks that are being gathered."""

    number: int
    deadline: float
    asked: set[int]  # pods
    askers: list[Asker] = field(default_factory=list)  # who wants to know
    snapshots: list[Snapshot] = field(default_factory=list)


class Stragglers:
    """Finds ranks that are slower than the others, over a sliding window of time.

    In synchronous training all ranks make the same number of steps in the same time: the fast ones wait for the slow
    one in collectives. So a rank's own work is the share of time in which no collective of it is pending, and a
    straggler is a rank that works much more of the time than the median rank does.
    """

    def __init__(self, window: float) -> None:
        """A rank is slow if it works _FACTOR times as long as the median rank, and chance does not explain it.

        Ranks are compared over the last ``window`` seconds, or _STEPS steps if these take longer.
        """
        self._window = window
        self._seen: deque[tuple[float, dict[int, RankStatus]]] = deque()  # looks at all ranks
        self.work: dict[int, float] = {}
        """The share of the window in which each rank works, of those that are known well enough."""
        self.slow: dict[int, float] = {}
        """The factors of the slow ranks, the slowest ones first."""

    def update(self, now: float, statuses: Iterable[RankStatus]) -> None:
        """Look at all ranks at the time ``now``, unless the latest look was a moment ago."""
        seen = {status.rank: status for status in statuses}
        if self._seen and self._seen[0][1].keys() != seen.keys():
            self.clear()  # other ranks than before
        window = max(self._window, _STEPS * max((status.step_seconds or 0.0 for status in seen.values()), default=0.0))
        if self._seen and now - self._seen[-1][0] < window / _LOOKS:
            return
        self._seen.append((now, seen))
        while len(self._seen) > 1 and now - self._seen[1][0] >= window:
            self._seen.popleft()
        since, first = self._seen[0]
        before, self.slow = self.slow, {}
        samples = {rank: status.samples - first[rank].samples for rank, status in seen.items()}
        self.work = {
            rank: 1 - (status.pending - first[rank].pending) / samples[rank]
            for rank, status in seen.items()
            if samples[rank]
        }
        if now - since < window or len(self.work) < max(2, len(seen)):
            return
        usual = statistics.median_low(self.work.values())
        for rank, share in sorted(self.work.items(), key=lambda item: (-item[1], item[0]))[:_SLOW_LIMIT]:
            part = _STAYS if rank in before else 1.0
            # The variance of a share is at most 0.25, divided by the number of samples.
            excess = max(_EXCESS, _SURE * math.sqrt(2 * 0.25 / min(samples.values())), (_FACTOR - 1) * usual)
            if share - usual >= part * excess:
                self.slow[rank] = round(share / max(usual, 0.01), 1)

    def clear(self) -> None:
        """Forget everything: a new attempt begins."""
        self._seen.clear()
        self.work, self.slow = {}, {}


class Actions(NamedTuple):
    """What the detector has others do."""

    request: Callable[[int, int], None]  # asks a pod for its stacks, with the number of the request
    answer: Callable[[Asker, dict[str, Any]], None]  # sends a report to one who asked for it
    show: Callable[[list[SlowRank], Standstill | None], None]  # other ranks are slow, or a standstill begins or ends
    log: Callable[[str], None]
    compare: Callable[[Mapping[int, float], Mapping[int, float]], None]  # gets the results of `Stragglers`


class HangDetector:
    """Finds hangs and slow ranks from the heartbeats of all pods.

    It has no clock or sockets of its own: its callers pass the time in ``now`` and messages in both directions.
    """

    def __init__(self, timeout: float | None, stragglers: Stragglers, do: Actions) -> None:
        """``timeout`` is as in `limit_of`."""
        self._timeout = timeout
        self._stragglers = stragglers
        self._do = do
        self._attempt = -1  # -1: none runs
        self._places: dict[int, tuple[str, str]] = {}  # names of pod and node, by pod
        self.ranks: Ranks = {}
        """The latest status of each rank of the attempt, by pod."""
        self._collection: _Collection | None = None
        self._number = 0  # of the latest request
        self._look_at = 0.0  # time of the next look at all ranks
        self._slow: list[SlowRank] = []
        self._standstill: Standstill | None = None
        self._look_again = 0.0  # time of the next look at the stacks while no rank makes progress

    def attempt_started(self, number: int, places: Mapping[int, tuple[str, str]], now: float) -> None:
        """Note that an attempt starts on these pods, whose names and nodes are ``places``."""
        self.attempt_ended()
        self._attempt = number
        self._places = dict(places)
        self._look_at = now + interval(self._timeout)

    def attempt_ended(self) -> None:
        """Note that no attempt runs."""
        self._attempt = -1
        self.ranks = {}
        self._stragglers.clear()
        self._slow, self._standstill, self._look_again = [], None, 0.0
        if self._collection and not self._collection.askers:
            self._collection = None

    def heartbeat(self, pod: int, status: PodStatus) -> None:
        """Note the status of a pod's ranks."""
        if status.attempt == self._attempt and pod in self._places:
            self.ranks[pod] = status.ranks

    def want_stacks(self, asker: Asker, now: float) -> None:
        """Gather the stacks of all ranks, and send a report to ``asker``."""
        (self._collection or self._start_collection(now)).askers.append(asker)

    def received_stacks(self, pod: int, number: int, snapshots: Sequence[Snapshot]) -> None:
        """Add the snapshots of a pod."""
        collection = self._collection
        if collection and collection.number == number:
            collection.asked.discard(pod)
            collection.snapshots += snapshots

    def tick(self, now: float) -> Failure | None:
        """Do all that is due. Returns the failure of a job that hangs."""
        if self._collection and (not self._collection.asked or now >= self._collection.deadline):
            return self._finish(self._collection)
        if self._attempt < 0 or now < self._look_at:
            return None
        self._look_at = now + interval(self._timeout)
        if len(self.ranks) < len(self._places):
            return None
        ranks = list(of_all(self.ranks))
        self._find_slow(now, ranks)
        if self._standstill and not self._stands(ranks):
            self._standstill = None
            self._do.show(self._slow, None)
        due = self._hang(ranks) or (self._stands(ranks) and now >= self._look_again)
        if due and not self._collection:
            self._look_again = now + _AGAIN
            self._start_collection(now)
        return None

    def due(self) -> float | None:
        """The time of the next `tick`; None if nothing is planned."""
        times = [self._collection.deadline if self._collection.asked else 0.0] if self._collection else []
        if self._attempt >= 0:
            times.append(self._look_at)
        return min(times, default=None)

    def _hang(self, ranks: Sequence[RankStatus]) -> bool:
        return hangs(ranks, lambda phase: limit_of(phase, self._timeout))

    def _stands(self, ranks: Sequence[RankStatus]) -> bool:
        return hangs(ranks, lambda phase: STANDSTILL)

    def _start_collection(self, now: float) -> _Collection:
        self._number += 1
        pods = set(self._places) if self._attempt >= 0 else set()
        self._collection = _Collection(self._number, now + _REPORT_TIMEOUT, pods)
        for pod in sorted(pods):
            self._do.request(pod, self._number)
        return self._collection

    def _finish(self, collection: _Collection) -> Failure | None:
        """Tell what the stacks say. Returns the failure if the job hangs still."""
        self._collection = None
        silent = [self._places[pod][0] for pod in sorted(collection.asked) if pod in self._places]
        ranks = list(of_all(self.ranks))
        # A hang is ended without stacks too, which a launcher that is in trouble does not send.
        snapshots = collection.snapshots or [Snapshot(each.rank, each.pod, *self._places[each.pod]) for each in ranks]
        diagnosis = diagnose(snapshots)
        report = to_dict(collection.snapshots, diagnosis, silent)
        for asker in collection.askers:
            self._do.answer(asker, report)
        first = next((each for each in snapshots if each.rank in diagnosis.ranks[:1]), None)
        if not (first and ranks):
            return None
        idle = min(min(status.idle, status.beat) for status in ranks)
        if not self._hang(ranks):
            if self._stands(ranks):
                self._tell_standstill(Standstill(time.time() - idle, diagnosis.sentence(), first.pod_name))
            return None
        hung = next((status for status in ranks if status.rank == first.rank), RankStatus(first.rank, first.pod))
        limit = f"limit {limit_of(hung.phase, self._timeout):g} s in phase {hung.phase}"
        self._do.log(f"no rank has made progress for {idle:.0f} s ({limit}): {diagnosis.sentence()}")
        for line in lines_of(report):
            self._do.log(line)
        return Failure(
            Kind.HANG,
            first.pod,
            first.rank,
            pod_name=first.pod_name,
            node=first.node,
            attempt=self._attempt,
            time=time.time(),
            message=diagnosis.predicate,
            traceback=f"{limit}\n" + textwrap.dedent("\n".join(stack_lines(first))),
            count=len(diagnosis.ranks),
            step=hung.step if hung.step >= 0 else None,
        )

    def _tell_standstill(self, standstill: Standstill) -> None:
        if self._standstill is None or standstill.text != self._standstill.text:
            self._standstill = standstill
            self._do.show(self._slow, standstill)
            self._do.log(standstill.summary)

    def _find_slow(self, now: float, ranks: Sequence[RankStatus]) -> None:
        self._stragglers.update(now, ranks)
        slow = self._stragglers.slow
        self._do.compare(self._stragglers.work, slow)
        if not slow and not self._slow:
            return
        pods = {status.rank: status.pod for status in ranks}
        waits = {status.rank: status.data_wait or 0.0 for status in ranks}
        usual = statistics.median_low([*waits.values()] or [0.0])
        told = {each.rank: each.data_wait for each in self._slow}
        self._slow = [
            SlowRank(
                rank,
                *self._places[pods[rank]],
                factor,
                waits[rank] if waits[rank] - usual >= _DATA else told.get(rank),
            )
            for rank, factor in slow.items()
        ]
        # The wait for data is of a line of metrics, which may come after a rank was named.
        news = [
            each
            for each in self._slow
            if each.rank not in told or (told[each.rank] is None and each.data_wait is not None)
        ]
        if not news and told.keys() == slow.keys():
            return
        self._do.show(self._slow, self._standstill)
        for each in news:
            self._do.log(each.summary)
