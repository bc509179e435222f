"""initialize(): the model's own initialization, of a model that was on the meta device, after it has been sharded.

An initializer may do anything with a parameter: slice it, transpose it, copy a matrix into it. On a DTensor some of
that fails, some is lost without a message (a view of a shard may be a copy), and random numbers repeat in each shard on
a CPU. So the initializer is given whole parameters: a mode of torch puts a whole tensor in the place of a sharded
parameter wherever the initializer uses it, and sets the shards from it when the initializer is done with it.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from flk_runtime.checkpoint.files import SavedWeights, Weights
from flk_runtime.checkpoint.load import SavedObject
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel.meta_init import Initializer, reset_method
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.system import pytree

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedCheckpoint


def initialize(parallel: ParallelModel, init: Initializer, names: Collection[str], *, broadcast: bool) -> None:
    """Call ``init`` with the model, of which the tensors with ``names`` were on the meta device. Collective.

    ``init`` may also be a path of weights. ``broadcast``: rank 0's values are sent to all ranks. Raises SetupError if a
    tensor is left unset, or ``init`` puts another one in the place of a parameter.
    """
    parameters = parallel.parameters()
    reset = {
        f"{path}.{name}"
        for path, module in parallel.model.named_modules()
        if reset_method(module)
        for name in module._buffers
    }
    before = {
        name: (tensor, tensor._version)
        for name, tensor in _tensors(parallel.model).items()
        if name in names and (tensor.is_floating_point() or name not in reset)
    }
    whole = _WholeParameters(parallel, broadcast)
    with torch.no_grad():
        if callable(init):
            collects = gc.isenabled()
            gc.disable()  # so that a view dies at the same operation on all ranks
            try:
                with whole:
                    init(parallel.model)
            finally:
                if collects:
                    gc.enable()
            whole.close()
        else:
            load_weights(parallel, init)
    after = _tensors(parallel.model)
    for name, parameter in parallel.parameters().items():
        if parameter is not parameters[name]:
            raise SetupError(f"init= puts another tensor in the place of {name!r}: set the values of the parameter")
    if broadcast:
        for tensor in after.values():
            if not whole.is_sharded(tensor):
                dist.broadcast(tensor.data, src=0)
    unset = [name for name, (tensor, version) in before.items() if _is_unset(after[name], tensor, version)]
    if found := sorted({name for names_of_rank in process_group.all_gather(unset) for name in names_of_rank}):
        raise SetupError(f"init= leaves {found[0]!r} of the model unset, which is on the meta device: set its values")


def load_weights(parallel: ParallelModel, path: str | os.PathLike[str]) -> None:
    """Load the weights at ``path`` into a model; each rank reads the chunks that it needs. Collective."""
    parallel.state.read(SavedObject(cast("SavedCheckpoint", SavedWeights(Weights(os.fspath(path)))), "model", {}))


class _WholeParameters(TorchFunctionMode):
    """While it is active, operations on a sharded parameter of the model get a whole tensor in its place."""

    def __init__(self, parallel: ParallelModel, broadcast: bool) -> None:
        super().__init__()
        self._parallel, self._broadcast = parallel, broadcast
        self._sharded = {
            id(parameter): parameter for parameter in parallel.parameters().values() if hasattr(parameter, "to_local")
        }
        self._open: dict[int, torch.Tensor] = {}  # whole tensors, by the id of their parameter
        self._aliases: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # views of them, by the address of their data

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether the values of ``tensor`` are set through this mode."""
        return id(tensor) in self._sharded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.map_leaves((args, kwargs or {}), self._whole)
        result = func(*args, **kwargs)
        for leaf in pytree.leaves(result):
            if isinstance(leaf, torch.Tensor) and (aliases := self._aliases.get(_address(leaf))) is not None:
                aliases.append(weakref.ref(leaf))
        return result

    def _whole(self, leaf: Any) -> Any:
        if id(leaf) not in self._sharded:
            return leaf
        if id(leaf) not in self._open:
            self.close(unused=True)
            full = self._parallel.full_tensor(leaf)
            assert full is not None  # noqa: S101
            self._open[id(leaf)] = full.clone()
            self._aliases[_address(self._open[id(leaf)])] = []
        return self._open[id(leaf)]

    def _has_view(self, full: torch.Tensor) -> bool:
        return any((view := ref()) is not None and view is not full for ref in self._aliases[_address(full)])

    def close(self, *, unused: bool = False) -> None:
        """Set the shards of the parameters that are open; of ``unused`` ones only, of which nothing has a view."""
        for key, full in list(self._open.items()):
            address = _address(full)
            if unused and self._has_view(full):
                continue
            if self._broadcast:
                dist.broadcast(full, src=0)
            parameter = self._sharded[key]
            parameter.copy_(self._parallel.local_shard(parameter, full))
            del self._open[key], self._aliases[address]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_unset(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether memory that was allocated, and filled with NaN if it is of floating point, has got no values."""
    if tensor.is_floating_point():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return bool(local.isnan().any())
    return tensor is before and tensor._version == version


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
