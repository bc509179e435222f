"""Places: where the trainings of this process keep their states, so that none resumes from another one's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from flk_runtime.contract.pod_layout import is_same_place

_TRAINING = "training"  # with a number: the folder of a later training, below the place that it was given


class Place:
    """What this process does with the checkpoints in a place. None is the memory of the pods alone."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.trainings = 0
        """How many runs and loops have been given this place."""
        self.kept = False
        """Whether a run or a loop has saved in it, which may be closed."""
        self.has_saved_by_script = False
        """Whether `flk.save` has saved in it."""
        self.restored: set[str] = set()
        """The names of what `flk.restore` has restored from it."""
        self._optimizers: dict[str, weakref.ref[Optimizer]] = {}  # that `flk.save` and `flk.restore` were given

    def trains(self, objects: Mapping[str, Any]) -> None:
        """Note the optimizers in ``objects``, which `flk.save` or `flk.restore` was given."""
        self._optimizers |= {key: weakref.ref(each) for key, each in objects.items() if isinstance(each, Optimizer)}

    def other_optimizer(self, objects: Mapping[str, Any]) -> str | None:
        """The name of an optimizer in ``objects`` in whose place another one was given before; None: there is none."""
        known = {key: self._optimizers[key]() for key in objects if key in self._optimizers}
        return next((key for key, each in known.items() if each is not objects[key]), None)


_places: list[Place] = []
_holder: Place | None = None  # its checkpoints are in the memory of the pods


def at(name: str | None) -> Place:
    """The place with this name, however a script writes it."""
    for place in _places:
        if is_same_place(place.name, name):
            return place
    _places.append(Place(name))
    return _places[-1]


def of_next_training(name: str | None) -> tuple[str | None, bool]:
    """The place of the next run or loop that is given ``name``, and whether the memory of the pods is for it.

    A later one in the same place has a folder of its own below it, by its number. So it begins anew, and finds its
    state after a restart, in which the script begins its trainings in the same order.
    """
    number = at(name).trainings
    if not number:
        return name, has_memory(name)
    place = f"{name.rstrip('/')}/{_TRAINING}-{number}" if name else None
    return place, bool(place) and has_memory(place)


def has_memory(name: str | None) -> bool:
    """Whether the memory of the pods, which has room for one training, is for the one in this place."""
    return _holder is None or is_same_place(_holder.name, name)


def hold_memory(name: str | None) -> None:
    """Note that the training in this place keeps its state, if it is the first one of the process that does."""
    global _holder
    _holder = _holder or at(name)


def holder() -> Place | None:
    """The place that the memory of the pods is for; None as long as no training has kept its state."""
    return _holder
