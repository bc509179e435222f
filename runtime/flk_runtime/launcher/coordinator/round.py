"""The state of the two things that alternate in a job: a round, in which members join, and the attempt that follows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from flk_runtime.contract.failure import Failure
from flk_runtime.launcher.preemption import Preemption
from flk_runtime.launcher.transport.messages import Message


class Actions(NamedTuple):
    """What the leader has others do."""

    send: Callable[[Collection[int], Message], None]  # a message to pods, if they are connected
    serve_attempt_store: Callable[[], int]  # replaces the ranks' store, and returns the port of the new one
    log: Callable[[str], None]


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
