"""Protocols of the objects whose state is in a checkpoint."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import nn

from flk_runtime.checkpoint.state import SplitState
from flk_runtime.contract.pod_layout import RUNTIME_PACKAGES
from flk_runtime.errors import SetupError

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

Modules = Mapping[str, nn.Module]  # by the names under which they are saved


class Stateful(Protocol):
    """An object with a state, such as a learning rate scheduler or a loader. `is_replicated` says whose state is saved.

    The state consists of what `flk_runtime.checkpoint.values` encodes. The name and the methods are
    the same as in `torch.distributed.checkpoint.stateful.Stateful`.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that `state_dict` has returned."""


# Classes whose objects every rank holds alike, with their subclasses.
_REPLICATED: Final = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


@dataclass(frozen=True)
class Declared:
    """An object of which the script has said whether all ranks hold it alike, by `replicated` or `per_rank`."""

    thing: Stateful
    replicated: bool

    def state_dict(self) -> dict[str, Any]:
        """The state of the object."""
        return self.thing.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the object this state."""
        self.thing.load_state_dict(state_dict)


def inside_of(thing: Any) -> Any:
    """The object that a script has passed, also in `replicated` or `per_rank`."""
    return thing.thing if isinstance(thing, Declared) else thing


def is_replicated(thing: Stateful) -> bool:
    """Whether every rank holds ``thing`` alike, so that rank 0's state is saved, and restored on all ranks.

    Modules, optimizers, learning rate schedulers, GradScaler and flk's own objects are replicated. Every other object,
    such as a loader, has a state on each rank.
    """
    if isinstance(thing, Declared):
        return thing.replicated
    return isinstance(thing, _REPLICATED) or type(thing).__module__.partition(".")[0] in RUNTIME_PACKAGES


def per_rank(thing: Any) -> Declared:
    """Say that ``thing`` has a state on each rank: every rank saves its own state and gets it back.

    ``thing`` has ``state_dict`` and ``load_state_dict``, or is a dictionary of plain values. Pass the result to `save`
    and `restore`, or to `Run.register`. Without it this holds for every object but modules, optimizers, learning rate
    schedulers, GradScaler and dictionaries, which are `replicated`. At another number of ranks such a state is refused:
    `restore` and `Run.register` raise CheckpointError with its name. Raises SetupError if ``thing`` has no state.
    """
    return Declared(with_state(thing), replicated=False)


def replicated(thing: Any) -> Declared:
    """Say that ``thing`` has the same state on all ranks: rank 0's is saved, and restored on any number of ranks.

    ``thing`` is as for `per_rank`. Without it this holds for modules, optimizers, learning rate schedulers, GradScaler
    and dictionaries. A scheduler or an average of the parameters of a class of your own needs it.
    """
    return Declared(with_state(thing), replicated=True)


def with_state(thing: Any) -> Stateful:
    """``thing``, or the `Values` of a dictionary. Raises SetupError for an object without a state."""
    if (found := stateful_of(thing)) is None:
        raise SetupError(
            f"a {type(thing).__name__} has no state that can be saved: it needs state_dict and load_state_dict, or a "
            'dictionary around it, as {"best": 0.5}, that is changed in place'
        )
    return found


def stateful_of(thing: Any) -> Stateful | None:
    """``thing`` if it has a state, the `Values` of a dictionary that has none of its own, and None for all else."""
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return cast("Stateful", thing)
    return Values(thing) if isinstance(thing, MutableMapping) else None


class Values:
    """A dictionary of plain values, which is changed in place."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """A copy of the dictionary."""
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put these values in the place of all others, tensors on the devices of those that they replace.

        Dictionaries and lists among them stay the same objects: the script may hold them by other names.
        """
        _refill(self._values, state_dict, set())


def _refill(own: Any, value: Any, filled: set[int]) -> Any:
    """``own`` with the content of a restored ``value`` if both are containers of one class, else what `beside` makes.

    ``filled``: the ids of containers that have their content: one that has two places stays in the first one. The
    outermost one, before which there is none, may be of any class.
    """
    if isinstance(own, MutableMapping | list) and id(own) not in filled and (type(own) is type(value) or not filled):
        filled.add(id(own))
        if isinstance(own, list):
            own[:] = [_refill(*pair, filled) for pair in zip([*own, *[None] * len(value)], value, strict=False)]
        else:
            value = {key: _refill(own.get(key), each, filled) for key, each in value.items()}
            own.clear()
            own.update(value)
        return own
    return beside(own, value)


def beside(own: Any, value: Any) -> Any:
    """A restored ``value``; a tensor on the device of that in ``own`` which it replaces."""
    return value.to(own.device) if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) else value


def state_of(thing: Stateful) -> dict[str, Any]:
    """The state of ``thing`` as it is saved: without functions of a scheduler, as SWALR of torch 2.9 has one."""
    if not isinstance(inside_of(thing), torch.optim.lr_scheduler.LRScheduler):
        return thing.state_dict()
    return {key: value for key, value in thing.state_dict().items() if not inspect.isroutine(value)}


def load_into(thing: Stateful, state: dict[str, Any]) -> None:
    """Give ``thing`` a saved state. Raises ValueError for the state of another scheduler than ``thing``."""
    inside = inside_of(thing)
    if isinstance(inside, torch.optim.lr_scheduler.LRScheduler):
        own, saved = ({key for key in each if not key.startswith("_")} for each in (inside.state_dict(), state))
        if own - saved and saved - own:  # one side may be of another release of torch
            raise ValueError(
                f"it is the state of another scheduler than {type(inside).__name__}: it has {min(saved - own)!r}, and "
                f"no {min(own - saved)!r}"
            )
    thing.load_state_dict(state)


def values_of(thing: Any) -> dict[str, Any] | None:
    """The values of a dictionary that is saved; None for another object."""
    return thing.state_dict() if isinstance(inside_of(thing), Values) else None


class DistributedStateful(ABC):
    """An object whose state is spread over the ranks, such as a sharded model. Each rank saves and loads its own."""

    is_of_model = False
    """Whether it is the state of a module: what trains on goes wrong where that begins anew."""

    @abstractmethod
    def save_state(self, name: str) -> SplitState:
        """The state that this rank holds, with paths that begin with ``name``. No communication, no copies."""

    @abstractmethod
    def load_state(self, saved: SavedObject) -> None:
        """Read this rank's chunks of the state. Raises CheckpointError or ValueError if it does not fit."""

    def is_of(self, thing: Any, modules: Modules) -> bool:
        """Whether it is the state of ``thing``, saved with these modules, for as long as that stays as it is."""
        return False

    def held_alike(self) -> dict[str, torch.Tensor]:
        """Tensors that all ranks have to hold alike, by name: a checkpoint has one of each. The default has none."""
        return {}
