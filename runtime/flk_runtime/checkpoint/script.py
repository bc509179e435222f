"""save() and restore(): checkpoints for scripts with a training loop of their own, with or without `flk_runtime.init`.

Models and optimizers are saved through torch.distributed.checkpoint.state_dict, so they may be plain or wrapped in DDP,
FSDP1 or FSDP2.
"""

from __future__ import annotations

import atexit
import os
import sys
from abc import abstractmethod
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flk_runtime import contract
from flk_runtime.checkpoint.manager import CheckpointManager
from flk_runtime.checkpoint.state import Piece, State, pieces_of, places_of
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.system import progress

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

_TIMEOUT = 1800.0  # seconds that a rank waits in the background for the file of another
_managers: dict[str, CheckpointManager] = {}  # by the place of the checkpoints


def save(step: int, /, checkpoint: str | os.PathLike[str] | None = None, wait: bool = False, **objects: Any) -> None:
    """Write a checkpoint of ``objects``, taken after ``step`` optimizer steps. Collective.

    The objects are modules, optimizers of one of these modules, anything with ``state_dict`` and ``load_state_dict``
    (schedulers, GradScaler, loaders of torchdata, datasets of Hugging Face), and dictionaries of plain values. The
    random states of every rank are saved too. Training stops until the state is copied; a thread writes it, and the end
    of the process waits for that, and this call if ``wait``. ``checkpoint``: folder or ``s3://BUCKET/PREFIX``; default
    $FLK_CHECKPOINT. Only checkpoints in the default place are kept in the memory of the pods too.

    Raises SetupError if there is no place for checkpoints, the run of `init` saves there, or an object cannot be saved,
    and CheckpointError on all ranks if the write before this one failed, or this one if ``wait``.
    """
    manager = _manager(checkpoint, resume=False)
    run = CheckpointManager.of_run
    if run and run.can_save and _is_same(run.place, manager.place):
        raise SetupError(
            f"the run saves its own state in {manager.place}: use run.register() and run.save(), or pass another "
            "checkpoint="
        )
    _register(manager, objects)
    manager.save(step)
    if wait:
        manager.wait()
    else:
        manager.watch()


def restore(checkpoint: str | os.PathLike[str] | None = None, **objects: Any) -> int:
    """Restore ``objects`` from the newest whole checkpoint; return its step, and 0 if there is none. Collective.

    Give the objects that `save` gets. Each rank reads only what it needs, at any world size and sharding. The random
    states are restored too. Raises SetupError as `save` does, and CheckpointError if a state does not fit.
    """
    manager = _manager(checkpoint, resume=True)
    _register(manager, objects)
    if manager.steps:
        manager.start_rank_rng()
    manager.finish_restoring(needs_model=False)
    return manager.steps


def _manager(checkpoint: str | os.PathLike[str] | None, *, resume: bool) -> CheckpointManager:
    place = os.fspath(checkpoint) if checkpoint else os.environ.get(contract.CHECKPOINT)
    if not place:
        raise SetupError(f"there is no place for checkpoints: pass checkpoint=, or set {contract.CHECKPOINT}")
    if place not in _managers or resume:
        page = progress.own_page()
        _managers[place] = CheckpointManager(
            place,
            0,
            lambda text: print(text, flush=True) if process_group.rank() == 0 else None,
            metadata={"job": os.environ.get(contract.JOB, ""), "flk": contract.VERSION, "torch": torch.__version__},
            timeout=_TIMEOUT,
            on_saved=lambda step: setattr(page, "saved", step),
            resume=resume,
            in_memory=_is_same(place, _default_place(place)),
        )
    return _managers[place]


def _default_place(first: str) -> str | None:
    """The place of the checkpoints that the memory of the pods is for; ``first`` if nothing else says so."""
    run = CheckpointManager.of_run
    if run:
        return run.place
    return os.environ.get(contract.CHECKPOINT) or next(iter(_managers), first)


def _is_same(place: str | None, other: str | None) -> bool:
    """Whether two addresses are of the same place."""
    first, second = (each if each is None or "://" in each else os.path.realpath(each) for each in (place, other))
    return first == second


def _register(manager: CheckpointManager, objects: dict[str, Any]) -> None:
    modules = [each for each in objects.values() if isinstance(each, nn.Module)]
    for name, thing in objects.items():
        known = manager.get(name)
        if isinstance(known, _TorchState) and known.is_of(thing, modules):
            continue
        adapted = _adapt(name, thing, modules)
        if known is None:
            manager.register(name, adapted)
        else:
            manager.replace(name, adapted)


def _adapt(name: str, thing: Any, modules: list[nn.Module]) -> Stateful | DistributedStateful:
    if isinstance(thing, nn.Module):
        return _ModuleState(thing)
    if isinstance(thing, Optimizer):
        own = {id(parameter) for group in thing.param_groups for parameter in group["params"]}
        for module in modules:
            if own <= {id(parameter) for parameter in module.parameters()}:
                return _OptimizerState(module, thing)
        raise SetupError(f"{name} is an optimizer of parameters that are in none of the modules: pass its module too")
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        adapted: Stateful = thing
        return adapted
    if isinstance(thing, MutableMapping):
        return _Values(thing)
    raise SetupError(
        f"{name} is a {type(thing).__name__}: pass modules, optimizers, objects with state_dict and load_state_dict, "
        "or dictionaries"
    )


class _Values:
    """A dictionary of plain values, which is changed in place."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values.clear()
        self._values.update(state_dict)


class _TorchState(DistributedStateful):
    """The state of a module or an optimizer, as torch.distributed.checkpoint.state_dict gives it.

    That takes milliseconds. A state that consists of the object's own tensors is used again as long as these stay where
    they are in memory.
    """

    def __init__(self) -> None:
        self._latest: State | None = None
        self._places: list[Any] | None = None  # of the object's tensors; None: the latest state is not used again

    def save_state(self, name: str) -> State:
        places = places_of(self._tensors())
        if self._latest is None or places is None or places != self._places:
            self._latest, tensors = self._read(name)
            found = places_of(tensors)  # None where the state is sharded: reading it is collective then
            own = {address for address, *_ in places or ()}
            self._places = places if found and all(address in own for address, *_ in found) else None
        return self._latest

    @abstractmethod
    def is_of(self, thing: Any, modules: list[nn.Module]) -> bool:
        """Whether this is the state of ``thing``, which is saved together with these modules."""

    @abstractmethod
    def _tensors(self) -> list[torch.Tensor]:
        """All tensors of the object."""

    @abstractmethod
    def _read(self, name: str) -> tuple[State, list[torch.Tensor]]:
        """The state, and all tensors of which it consists, also those that other ranks save."""


class _ModuleState(_TorchState):
    """The state of a module that may be wrapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        own = module.module if isinstance(module, DistributedDataParallel) else None
        self._shared = {name for name, _ in own.named_parameters(remove_duplicate=False)} if own else set()

    def is_of(self, thing: Any, modules: list[nn.Module]) -> bool:
        return thing is self._module

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._module))

    def _read(self, name: str) -> tuple[State, list[torch.Tensor]]:
        pieces: list[Piece] = []
        state = self._state()
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        tensors = {key: value for key, value in state.items() if key not in plain}
        for key, value in tensors.items():
            if key in self._shared or _is_sharded(value) or process_group.rank() == 0:
                pieces += pieces_of((name, key), value)
        return State(pieces, plain), [] if plain else list(tensors.values())

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        state = self._state()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved.checkpoint.read([piece for key in tensors for piece in pieces_of((saved.name, key), tensors[key])])
        set_model_state_dict(self._module, {**state, **{key: saved.plain[key] for key in state if key not in tensors}})


class _OptimizerState(_TorchState):
    """The state of an optimizer whose parameters are in a module that may be wrapped."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self._module, self._optimizer = module, optimizer

    def is_of(self, thing: Any, modules: list[nn.Module]) -> bool:
        return thing is self._optimizer and any(module is self._module for module in modules)

    def save_state(self, name: str) -> State:
        latest = super().save_state(name)
        if self._places is None:
            return latest
        groups = [  # a scheduler changes the hyperparameters
            {**group, "params": known["params"]}
            for group, known in zip(self._optimizer.param_groups, latest.plain["param_groups"], strict=True)
        ]
        return State(latest.pieces, {"param_groups": groups})

    def _tensors(self) -> list[torch.Tensor]:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return parameters + [value for value in values if isinstance(value, torch.Tensor)]

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._module, self._optimizer))

    def _read(self, name: str) -> tuple[State, list[torch.Tensor]]:
        state = self._state()
        shared = isinstance(self._module, DistributedDataParallel) or process_group.rank() == 0
        tensors = {
            (name, "state", own, key): value
            for own, values in state["state"].items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        pieces = [
            piece for path, value in tensors.items() if shared or _is_sharded(value) for piece in pieces_of(path, value)
        ]
        return State(pieces, {"param_groups": state["param_groups"]}), list(tensors.values())

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        state = self._state()
        saved.checkpoint.read(
            [
                piece
                for own, values in state["state"].items()
                for key, value in values.items()
                if isinstance(value, torch.Tensor)
                for piece in pieces_of((saved.name, "state", own, key), value)
            ]
        )
        set_optimizer_state_dict(self._module, self._optimizer, {**state, "param_groups": saved.plain["param_groups"]})


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local") or hasattr(value, "local_shards")


@atexit.register
def _complete() -> None:
    """Wait for writes that are going on, unless the script has failed: other ranks may be gone then."""
    if not hasattr(sys, "last_type"):
        for manager in _managers.values():
            manager.wait()
