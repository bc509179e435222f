"""Membership: which pods train in the next attempt, in which order, and how long the leader waits for others.

A job alternates between a `Round`, in which members join, and the attempt that follows, of which `LatestAttempt` is
what the leader knows.

A job has a least and a greatest number of pods that train. They are equal unless the job is elastic. Pods that have
joined beyond the greatest number are spares: they wait, and take the place of a pod that is lost.

This module has no clock: `leader` passes the time, in seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from flk_runtime.contract.failure import Failure
from flk_runtime.contract.quantities import parse_ranges
from flk_runtime.launcher.preemption import Preemption
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import Join

ADMISSION_DELAY: Final = 0.5  # seconds in which pods that join one after the other are admitted together


@dataclass
class Round:
    """A wait for members to be ready for the next attempt. Times are in seconds by the clock of the leader's caller."""

    since: float
    deadline: float  # by which enough members have joined, or the job ends
    progress_at: float  # time of the next line about pods that have not joined
    call_until: float | None = None  # the attempt starts with the members that have joined by then; None: too few have
    start_at: float | None = None  # the attempt starts then, after a delay: its members are known

    @property
    def ends_at(self) -> float:
        """When the round ends with the members that have joined until then."""
        if self.start_at is not None:
            return self.start_at
        return self.deadline if self.call_until is None else min(self.deadline, self.call_until)


@dataclass
class LatestAttempt:
    """What the leader knows of the latest attempt, beside what is in the history of the job."""

    admitted: dict[int, str] = field(default_factory=dict)  # incarnation of each pod that takes part
    places: dict[int, tuple[str, str]] = field(default_factory=dict)  # names of pod and node, by pod
    done: set[int] = field(default_factory=set)  # pods whose ranks have all ended with success
    grouped: bool = False  # a rank of these had opened a process group
    waiting: dict[int, float] = field(default_factory=dict)  # pods that have joined meanwhile, and when
    preemption: Preemption | None = None
    urgent: bool = False  # the preemption happens because a pod has to stop
    secondary: Failure | None = None  # has been reported, and ends the attempt unless a primary one does
    end_at: float = 0.0  # when it does

    @property
    def training(self) -> set[int]:
        """The pods whose ranks have not all ended with success."""
        return self.admitted.keys() - self.done


class Membership:
    """The pods of the latest attempt and of the next one. Pod 0 always takes part, because it leads."""

    def __init__(self, settings: Settings) -> None:
        self.current: list[int] = []
        """The pods of the latest attempt, in the order of their ranks."""
        self._settings = settings
        self._expected = set(range(settings.pods))  # pods that may join soon
        self.leaving: set[int] = set()
        """Pods of the latest attempt that have to stop."""
        self._enough_since: float | None = None  # when enough pods had joined

    def resume(self, pods: str) -> None:
        """Take over the pods of the attempt that a former leader has started, as its history names them.

        Another text, and numbers that are no pods of this job, change nothing.
        """
        with contextlib.suppress(ValueError):
            self.current = [pod for pod in dict.fromkeys(parse_ranges(pods)) if pod < self._settings.pods]
        if self.current:
            self._expected = set(self.current)

    def leave(self, pod: int) -> None:
        """Note that a pod has to stop: the next attempt does not wait for it."""
        self.leaving.add(pod)
        self._expected.discard(pod)

    def start_round(self) -> None:
        """Note that the latest attempt has ended: its pods may join the next one, unless they had to stop."""
        self._expected = set(self.current) - self.leaving
        self._enough_since = None

    def ready_at(self, joined: Collection[int], connected: Collection[int], now: float) -> float | None:
        """The time at which an attempt can start with the pods that have ``joined``; None: more must join.

        The leader waits for pods that are ``connected`` and still end their ranks. Once there are enough pods, it waits
        the time of the last call for the other pods of the latest attempt: a pod that was lost may be back soon. It
        always waits for its own pod, which may connect to it later than others do.
        """
        if len(joined) < self._settings.least_pods or 0 not in joined:
            self._enough_since = None
            return None
        if self._enough_since is None:
            self._enough_since = now
        if self._expected.intersection(connected).difference(joined):
            return None
        if len(joined) >= self._settings.most_pods or self._expected <= set(joined):
            return now
        return self._enough_since + self._settings.last_call

    def choose(self, joined: Mapping[int, Join], avoided: Collection[str]) -> list[int]:
        """The pods of the next attempt, in the order of their ranks. The others that have joined are spares.

        Pods that were in the latest attempt come first, and pods on ``avoided`` nodes last. If the
        number of pods stays the same, each pod keeps its ranks, and a new pod gets the ranks of the pod that it
        replaces.
        """

        former = set(self.current)

        def preference(pod: int) -> tuple[bool, bool, bool, int]:
            return pod != 0, joined[pod].node in avoided, pod not in former, pod

        chosen = sorted(sorted(joined, key=preference)[: self._settings.most_pods])
        if len(chosen) == len(self.current):
            new, staying = iter(sorted(set(chosen) - former)), former.intersection(chosen)
            chosen = [pod if pod in staying else next(new) for pod in self.current]
        self.current = chosen
        self.leaving.clear()
        return chosen

    def grows_at(self, waiting: Mapping[int, float]) -> float | None:
        """The time at which the pods that are ``waiting`` are admitted; None: none waits, or none may be added.

        The values of ``waiting`` are the times since when the pods wait.
        """
        room = self._settings.most_pods - len(self.current)
        if room <= 0 or not waiting:
            return None
        first = min(waiting.values())
        return first if len(waiting) >= room else first + ADMISSION_DELAY

    def missing(self, joined: Collection[int]) -> Sequence[int]:
        """The pods of the job that have not joined."""
        return [pod for pod in range(self._settings.pods) if pod not in joined]
