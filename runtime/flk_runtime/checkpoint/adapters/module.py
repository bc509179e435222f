"""ModuleState: the state of a module that is plain, or wrapped in DDP or FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from flk_runtime.checkpoint.adapters.wrappers import Parts, is_sharded, local, parameters_of, reshard, user_name
from flk_runtime.checkpoint.state import Chunk, ChunkCache, SplitState, chunks_of
from flk_runtime.checkpoint.stateful import DistributedStateful, Modules
from flk_runtime.checkpoint.values import Path
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.system.pytree import leaves

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

_EXTRA_STATE: Final = "_extra_state"  # torch's name for what nn.Module.get_extra_state returns


class ModuleState(DistributedStateful):
    """The state of a module, by the names of the user's module.

    Each rank offers its chunks of sharded tensors, and of DDP's parameters, which are equal on all ranks. Rank 0 saves
    all other tensors, such as DDP's buffers. Of `Parts` each rank offers all, and loads what it has itself.
    """

    is_of_model = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._equal = set(parameters_of(module)) if isinstance(module, DistributedDataParallel) else set()
        self._cache = ChunkCache()
        # What a forward pass may give another shape: buffers, and the parameters of lazy modules.
        self._shapes = {
            user_name(module, f"{prefix}.{key}".removeprefix(".")): (
                None if each is None or is_lazy(each) else tuple(each.shape)
            )
            for prefix, child in module.named_modules()
            for key, each in (*child._buffers.items(), *child._parameters.items())
            if key in child._buffers or is_lazy(each)
        }
        self.trains_alike = False
        """Whether nothing but the script keeps whole parameters alike on all ranks, so that a save compares them."""

    def is_of(self, thing: Any, modules: Modules) -> bool:
        return thing is self._module

    def save_state(self, name: str) -> SplitState:
        state = self.entries()
        for key, shape in self._shapes.items():
            if isinstance(value := state.get(key), torch.Tensor) and (is_lazy(value) or value.shape != shape):
                raise MismatchError(
                    f"{key!r} of {name} has the shape {None if is_lazy(value) else tuple(value.shape)}, and had "
                    f"{shape} at the start, so that a restart could not load it: give it its shape before flk gets the "
                    "model, as by a forward pass, or pass persistent=False to register_buffer if it is a buffer"
                )
        tensors: dict[Path, torch.Tensor] = {
            (name, key): value for key, value in state.items() if isinstance(value, torch.Tensor)
        }
        plain = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        if plain and isinstance(self._module, Parts):
            raise MismatchError(f"{next(iter(plain))!r} of a part of a model is no tensor, and cannot be saved")
        return SplitState(self._cache.chunks(tensors, self._chunks_of), plain)

    def load_state(self, saved: SavedObject) -> None:
        if not isinstance(self._module, Parts) and (unexpected := saved.entry_not_in(self.entries())):
            raise ValueError(f"unexpected key {unexpected!r}: the module has no such entry")
        checkpoint, own = saved.checkpoint, self.entries()
        # An extra state is what its module makes of it: the saved one may be of another shape, or no tensor.
        names = {key: f"{saved.name}.{key}" for key in own if key.rpartition(".")[2] == _EXTRA_STATE}
        extra = {key: checkpoint.empty(name) for key, name in names.items() if checkpoint.shape(name) is not None}
        placed = {key: value.to(getattr(own[key], "device", "cpu")) for key, value in extra.items()}
        self.read(saved, {**dict.fromkeys(names), **placed})

    def read(self, saved: SavedObject, extra: Mapping[str, torch.Tensor | None] | None = None) -> None:
        """Load as `load_state` does, where ``saved`` may have entries that the module does not have.

        ``extra``: what extra states are read into; None for those that are no tensors. Without it, only tensors are
        loaded.
        """
        state = {**self.entries(), **(extra or {})}
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved.checkpoint.read([chunk for key in tensors for chunk in chunks_of((saved.name, key), tensors[key])])
        plain = saved.state_dict() if saved.plain else {}
        self._set(tensors, {key: plain[key] for key in state if key not in tensors and extra is not None})

    def entries(self) -> dict[str, Any]:
        """The tensors and values that are saved, by the names of the user's module."""
        reshard(self._module)
        return {user_name(self._module, name): value for name, value in self._module.state_dict().items()}

    def held_alike(self) -> dict[str, torch.Tensor]:
        """Trained parameters as `trains_alike` says, and the tensors of a module without parameters, such as a metric.

        A metric may sum up what each rank has seen.
        """
        if self.trains_alike:
            whole: dict[int, Any] = {id(each): (name, each) for name, each in parameters_of(self._module).items()}
            return {
                repr(name): local(each)
                for name, each in whole.values()
                if each.requires_grad and (not is_sharded(each) or each.device_mesh.size() == 1)  # as precision= has it
            }
        if isinstance(self._module, Parts) or any(True for _ in self._module.parameters()):
            return {}
        found = {
            repr(key) if leaf is value else f"{key!r} ({number})": leaf
            for key, value in self.entries().items()
            for number, leaf in enumerate(leaves(value))
        }
        return {
            key: leaf.detach() if leaf.is_floating_point() else leaf.detach().double()
            for key, leaf in found.items()
            if isinstance(leaf, torch.Tensor) and not leaf.is_complex()
        }

    def _set(self, tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
        """Have the module load these, its own tensors too: it may compute something from what it loads."""
        values = tensors | plain
        state = self._module.state_dict()  # with the versions of the modules, as load_state_dict expects it
        for name in list(state):
            if (key := user_name(self._module, name)) in values:
                state[name] = values[key]
            else:
                del state[name]
        load = self._module.load_state_dict
        # A method of the script's own may take nothing but the state.
        has_strict = any(
            each.name == "strict" or each.kind is each.VAR_KEYWORD
            for each in inspect.signature(load).parameters.values()
        )
        load(state, **({"strict": False} if has_strict else {}))

    def _chunks_of(self, path: Path, value: torch.Tensor) -> list[Chunk]:
        equal = path[1] in self._equal or isinstance(self._module, Parts)
        return chunks_of(path, value) if equal or is_sharded(value) or process_group.rank() == 0 else []
