"""Adapters of a script's modules, optimizers and plain values to the protocols of what a checkpoint saves.

A module may be plain, or wrapped in DDP, FSDP1 or FSDP2. Its names are those of torch.distributed.checkpoint.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flk_runtime.checkpoint.optimizer_state import (
    ModelParameters,
    OptimizerState,
    checking_groups,
    join_values,
    split_values,
)
from flk_runtime.checkpoint.state import Path, Piece, State, pieces_of, places_of
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful, Values
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

Modules = Mapping[str, nn.Module]  # by the names under which they are saved

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # of activation checkpointing, in names


class TorchState(DistributedStateful):
    """The state of a module or of an optimizer."""

    @abstractmethod
    def is_of(self, thing: Any, modules: Modules) -> bool:
        """Whether this is the state of ``thing``, which is saved together with these modules."""


def adapt(name: str, thing: Any, modules: Modules) -> Stateful | TorchState:
    """The state of ``thing``, which is saved under ``name`` together with these modules.

    Raises SetupError if it cannot be saved, or is an optimizer of parameters that are in none of the modules.
    """
    if isinstance(thing, nn.Module):
        return _ModuleState(thing)
    if isinstance(thing, Optimizer):
        trained = _trained(name, thing, modules)
        if not any(_has_fsdp1(module) for module in trained.values()):
            return _OptimizerState(trained, thing)
        if len(trained) == 1:
            return _FSDP1OptimizerState(trained, thing)
        raise SetupError(
            f"{name} is an optimizer of {len(trained)} modules, {' and '.join(trained)}, and FSDP1 wraps one of them: "
            "make an optimizer for each, or put them into one module"
        )
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        adapted: Stateful = thing
        return adapted
    if isinstance(thing, MutableMapping):
        return Values(thing)
    raise SetupError(
        f"{name} is a {type(thing).__name__}: pass modules, optimizers, objects with state_dict and load_state_dict, "
        "or dictionaries"
    )


def _trained(name: str, optimizer: Optimizer, modules: Modules) -> Modules:
    """The modules whose parameters the optimizer has: one if that has them all."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own: dict[str, set[int]] = {}
    for key, module in modules.items():
        _reshard(module)
        own[key] = {id(parameter) for parameter in module.parameters()}
        if wanted <= own[key]:
            return {key: module}
    if missing := len(wanted.difference(*own.values())):
        raise SetupError(
            f"{name} is an optimizer of {len(wanted)} parameters, and {missing} of them are in none of the modules: "
            "pass their module too"
        )
    return {key: modules[key] for key, found in own.items() if wanted & found}


class _ModuleState(TorchState):
    """The state of a module that may be wrapped, as torch.distributed.checkpoint.state_dict gives it.

    That takes milliseconds. A state that consists of the module's own tensors is used again as long as these stay where
    they are in memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        own = module.module if isinstance(module, DistributedDataParallel) else None
        self._shared = {name for name, _ in own.named_parameters(remove_duplicate=False)} if own else set()
        self._latest: State | None = None
        self._places: list[Any] | None = None  # of the module's tensors; None: the latest state is not used again

    def is_of(self, thing: Any, modules: Modules) -> bool:
        return thing is self._module

    def save_state(self, name: str) -> State:
        places = places_of([*self._module.parameters(), *self._module.buffers()])
        if self._latest is None or places is None or places != self._places:
            self._latest, tensors = self._read(name)
            found = places_of(tensors)  # None where the state is sharded: reading it is collective then
            own = {address for address, *_ in places or ()}
            self._places = places if found and all(address in own for address, *_ in found) else None
        return self._latest

    def _read(self, name: str) -> tuple[State, list[torch.Tensor]]:
        """The state, and all tensors of which it consists, also those that other ranks save."""
        pieces: list[Piece] = []
        state = self._state()
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        tensors = {key: value for key, value in state.items() if key not in plain}
        for key, value in tensors.items():
            if key in self._shared or _is_sharded(value) or process_group.rank() == 0:
                pieces += pieces_of((name, key), value)
        return State(pieces, plain), [] if plain else list(tensors.values())

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._module))

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        state = self._state()
        if unexpected := saved.entry_not_in(state):
            raise ValueError(f"unexpected key {unexpected!r}: the module has no such entry")
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved.checkpoint.read([piece for key in tensors for piece in pieces_of((saved.name, key), tensors[key])])
        set_model_state_dict(self._module, {**state, **{key: saved.plain[key] for key in state if key not in tensors}})


class _Parameters(ModelParameters):
    """The parameters of modules that are plain, or wrapped in DDP or FSDP2.

    Of several modules, a name begins with the one under which the module is saved.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def parameters(self) -> dict[str, nn.Parameter]:
        found = {}
        for key, module in self._modules.items():
            _reshard(module)
            prefix = f"{key}." if len(self._modules) > 1 else ""
            found.update({prefix + _user_name(module, name): value for name, value in module.named_parameters()})
        return found

    def state_pieces(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Piece]:
        shared = all(isinstance(module, DistributedDataParallel) for module in self._modules.values())
        offers = shared or _is_sharded(value) or process_group.rank() == 0
        return pieces_of(path, value) if offers else []


class _OfModules(TorchState):
    """What the two kinds of optimizer state share."""

    def __init__(self, modules: Modules, optimizer: Optimizer) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._count = _count(optimizer)

    def is_of(self, thing: Any, modules: Modules) -> bool:
        same = thing is self._optimizer and all(modules.get(key) is each for key, each in self._modules.items())
        return same and _count(thing) == self._count  # else it has got parameters, which may be of another module


def _count(optimizer: Optimizer) -> int:
    """The number of an optimizer's parameters."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


class _OptimizerState(OptimizerState, _OfModules):
    """The state of an optimizer of the parameters of some modules."""

    def __init__(self, modules: Modules, optimizer: Optimizer) -> None:
        OptimizerState.__init__(self, optimizer, _Parameters(modules))
        _OfModules.__init__(self, modules, optimizer)


class _FSDP1OptimizerState(_OfModules):
    """The state of an optimizer of FSDP1's flat parameters, which only FSDP1 can cut into those of the module."""

    def __init__(self, modules: Modules, optimizer: Optimizer) -> None:
        super().__init__(modules, optimizer)
        (self._module,) = modules.values()

    def save_state(self, name: str) -> State:
        state = self._state()
        tensors, plain = split_values(state["state"].items())
        pieces = [
            piece
            for path, value in tensors.items()
            if _is_sharded(value) or process_group.rank() == 0
            for piece in pieces_of((name, "state", *path), value)
        ]
        return State(pieces, {**plain, "param_groups": state["param_groups"]})

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        known = self._state()["state"]
        entries: dict[str, dict[str, Any]] = {}
        pieces: list[Piece] = []
        for full, path in saved.checkpoint.names((saved.name, "state")):
            own, key = str(path[2]), str(path[3])
            value = known.get(own, {}).get(key)
            if not isinstance(value, torch.Tensor):
                value = saved.checkpoint.empty(full)
            entries.setdefault(own, {})[key] = value
            pieces += pieces_of(path, value)
        saved.checkpoint.read(pieces)
        join_values(entries, saved.plain)
        state = {"state": entries, "param_groups": saved.plain["param_groups"]}
        # Not strict: a parameter that has had no gradient has no state.
        with checking_groups(self._optimizer):
            set_optimizer_state_dict(self._module, self._optimizer, state, options=StateDictOptions(strict=False))

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._module, self._optimizer))


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local") or hasattr(value, "local_shards")


def _has_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes long to import, and is if the module is wrapped
    return fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules())


def _reshard(module: nn.Module) -> None:
    """Free full parameters that a forward pass without a backward pass has left, if FSDP2 has sharded the module."""
    for each in module.modules():
        if hasattr(each, "set_reshard_after_backward"):  # an FSDPModule
            cast("Any", each).reshard()


def _user_name(module: nn.Module, name: str) -> str:
    """The name of a parameter without what DDP, torch.compile and activation checkpointing have added to it."""
    return ".".join(_user_parts(module, name.replace(_CHECKPOINT_WRAPPER, "").split(".")))


def _user_parts(module: nn.Module, parts: list[str]) -> Iterator[str]:
    current: Any = module
    for part in parts:
        wrapped = part == "_orig_mod" or (part == "module" and isinstance(current, DistributedDataParallel))
        if not wrapped:
            yield part
        current = getattr(current, part, None)
