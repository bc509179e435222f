"""Process: what this process trains, and where its trainings keep their states, so that none resumes from another one.

A process has one training at a time: a run of `init`, a loop of `adopt`, or what `flk.save` is given. `current` knows
it, and is the only state of this package that outlives a training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flk_runtime.contract.pod_layout import is_same_place

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from flk_runtime.checkpoint import CheckpointManager
    from flk_runtime.parallel import ParallelModel, ParallelOptions

    Planner = Callable[[nn.Module, Sequence[Optimizer], ParallelOptions], ParallelModel]

_TRAINING = "training"  # with a number: the folder of a later training, below the place that it was given


class Training(Protocol):
    """A run or a loop."""

    closed: bool

    @property
    def manager(self) -> CheckpointManager:
        """Of its checkpoints."""

    def end_step(self) -> None:
        """Save what the latest step has made due. Collective."""

    def say_unsaved(self) -> None:
        """Say what no checkpoint has."""

    def abandon(self) -> None:
        """Leave without waiting for other ranks."""


@dataclass(eq=False)
class Place:
    """What this process does with the checkpoints in a place. The name None is the memory of the pods alone."""

    name: str | None
    trainings: int = 0
    """How many runs and loops have been given this place."""
    saved_by: str = ""
    """What has saved in it: ``training`` (a run or a loop, which may be closed) or ``script`` (`flk.save`)."""
    restored: set[str] = field(default_factory=set)
    """The names of what `flk.restore` has restored from it."""
    manager: CheckpointManager | None = None
    """Of `flk.save` and `flk.restore`, as soon as one of them was called."""


class Process:
    """The trainings of a process and the places of their checkpoints."""

    def __init__(self) -> None:
        self.training: Training | None = None
        """The latest run or loop, which may be closed."""
        self.memory: Place | None = None
        """The place of the first training: the memory of the pods has room for one."""
        self.writers: dict[CheckpointManager, Training | None] = {}
        """The managers whose writes the end of the process awaits, each with the training that it is of."""
        self.id = 0
        """The process that ``writers`` are of, which may have been forked since."""
        self.stops = False
        """The latest answer of `must_stop`."""
        self.planner: Planner | None = None
        """Answers the calls of `Run.parallelize`, where a script is planned."""
        self.tick: Callable[[], None] | None = None
        """Called at the end of each step, where a script is measured."""
        self._places: list[Place] = []

    @property
    def is_training(self) -> bool:
        """Whether a run or a loop has begun that is not closed."""
        return self.training is not None and not self.training.closed

    @property
    def manager(self) -> CheckpointManager | None:
        """The manager of the checkpoints of the latest run or loop, which may be closed."""
        return self.training.manager if self.training else None

    def place(self, name: str | None) -> Place:
        """The place with this name, however a script writes it."""
        for place in self._places:
            if is_same_place(place.name, name):
                return place
        self._places.append(Place(name))
        return self._places[-1]

    def next_place(self, name: str | None) -> tuple[Place, bool]:
        """The place of the next run or loop that is given ``name``, and whether the memory of the pods is for it.

        A later one in the same place has a folder of its own below it, by its number. So it begins anew, and finds its
        state after a restart, in which the script begins its trainings in the same order.
        """
        place = self.place(name)
        if place.trainings and not name:
            return Place(None), False
        if place.trainings:
            place = self.place(f"{str(name).rstrip('/')}/{_TRAINING}-{place.trainings}")
        return place, self.takes_memory(place)

    def takes_memory(self, place: Place) -> bool:
        """Whether the memory of the pods is for the training in this place: it is for the first one of the process."""
        self.memory = self.memory or place
        return self.memory is place

    @property
    def managers(self) -> list[CheckpointManager]:
        """The managers of the places that `flk.save` and `flk.restore` were called with."""
        return [place.manager for place in self._places if place.manager]

    @contextlib.contextmanager
    def observed(self, *, planner: Planner | None = None, tick: Callable[[], None] | None = None) -> Iterator[None]:
        """Inside, ``planner`` answers each `Run.parallelize`, and each step calls ``tick``."""
        self.planner, self.tick = planner, tick
        try:
            yield
        finally:
            self.planner = self.tick = None


current = Process()
