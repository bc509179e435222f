"""save() and restore(): checkpoints for scripts with a training loop of their own, with or without `flk_runtime.init`.

Models and optimizers are saved through torch.distributed.checkpoint.state_dict, so they may be plain or wrapped in DDP,
FSDP1 or FSDP2.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flk_runtime import contract
from flk_runtime.checkpoint.manager import CheckpointManager
from flk_runtime.checkpoint.state import Piece, State, pieces_of
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
    $FLK_CHECKPOINT.

    Raises SetupError if there is no place for checkpoints or an object cannot be saved, and CheckpointError on all
    ranks if the write before this one failed, or this one if ``wait``.
    """
    manager = _manager(checkpoint, resume=False)
    _register(manager, objects)
    manager.save(step)
    if wait:
        manager.wait()


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
        )
    return _managers[place]


def _register(manager: CheckpointManager, objects: dict[str, Any]) -> None:
    modules = [each for each in objects.values() if isinstance(each, nn.Module)]
    for name, thing in objects.items():
        adapted = _adapt(name, thing, modules)
        if name in manager.names:
            manager.replace(name, adapted)
        else:
            manager.register(name, adapted)


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


class _ModuleState(DistributedStateful):
    """The state of a module that may be wrapped."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        own = module.module if isinstance(module, DistributedDataParallel) else None
        self._shared = {name for name, _ in own.named_parameters(remove_duplicate=False)} if own else set()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._module))

    def save_state(self, name: str) -> State:
        pieces: list[Piece] = []
        plain = {}
        for key, value in self._state().items():
            if not isinstance(value, torch.Tensor):
                plain[key] = value
            elif key in self._shared or _is_sharded(value) or process_group.rank() == 0:
                pieces += pieces_of((name, key), value)
        return State(pieces, plain)

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        state = self._state()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved.checkpoint.read([piece for key in tensors for piece in pieces_of((saved.name, key), tensors[key])])
        set_model_state_dict(self._module, {**state, **{key: saved.plain[key] for key in state if key not in tensors}})


class _OptimizerState(DistributedStateful):
    """The state of an optimizer whose parameters are in a module that may be wrapped."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module, self._optimizer = module, optimizer

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._module, self._optimizer))

    def save_state(self, name: str) -> State:
        state = self._state()
        shared = isinstance(self._module, DistributedDataParallel) or process_group.rank() == 0
        pieces = [
            piece
            for own, values in state["state"].items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and (shared or _is_sharded(value))
            for piece in pieces_of((name, "state", own, key), value)
        ]
        return State(pieces, {"param_groups": state["param_groups"]})

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
