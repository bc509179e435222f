"""The start of a model: rank 0's values go to all ranks, and a model on the meta device gets its values once sharded.

An initializer may do anything with a parameter: slice it, transpose it, copy a matrix into it. On a DTensor some of
that fails, some is lost without a message (a view of a shard may be a copy), and random numbers repeat in each shard on
a CPU. So the initializer is given whole parameters: a mode of torch puts a whole tensor in the place of a sharded
parameter wherever the initializer uses it, and sets the shards from it when the initializer is done with it.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flk_runtime import distributed
from flk_runtime.checkpoint import is_sharded, local
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import inner_first
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.system import pytree

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedCheckpoint

Initializer = Callable[[nn.Module], object] | str | os.PathLike[str]
RESETS = "reset_parameters"  # the initializer that says that the methods of this name set all values
_RESET_METHODS = (RESETS, "_reset_parameters")  # nn.MultiheadAttention has the second


def meta_names(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers of ``model`` that are on the meta device."""
    return [name for name, tensor in _tensors(model).items() if tensor.is_meta]


def check_init(names: Collection[str], init: Initializer | None) -> None:
    """Raise SetupError if the tensors with ``names`` are on the meta device and no initializer is given for them.

    What a constructor sets is lost there, and nothing shows in all cases that it has set something.
    """
    if names and init is None:
        raise SetupError(
            f"{next(iter(names))!r} of the model is on the meta device, where the values that its constructor sets are "
            "lost: pass init=, a function that sets them, the path of weights, or "
            f"init={RESETS!r} if {RESETS}() of the modules sets all of them"
        )


def place(
    modules: Iterable[nn.Module], device: torch.device, moved: dict[torch.Tensor, torch.Tensor], *, broadcast: bool
) -> None:
    """Move the modules' own tensors to ``device``; with ``broadcast``, all ranks get rank 0's values. Collective then.

    Those on the meta device, and those that are sharded, stay as they are. ``moved``: where buffers of the model have
    been moved, which several modules may share.
    """
    sent: list[torch.Tensor] = []
    for module in modules:
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta or is_sharded(tensor):
                    continue
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.to(device)  # the same object: it may be tied
                else:
                    tensor = module._buffers[name] = moved.setdefault(tensor, tensor.to(device))
                sent.append(tensor.data)
    if broadcast:
        distributed.broadcast(sent)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of ``model`` on the meta device memory, filled with NaN so that unset values are noticed."""
    made: dict[torch.Tensor, torch.Tensor] = {}  # a tied tensor gets memory once
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    made[tensor] = _with_memory(tensor, device)
                table[name] = made[tensor]


def _with_memory(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.full_like(meta, torch.nan if meta.is_floating_point() else 0, device=device, requires_grad=False)
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
        tensor.__dict__.update(meta.__dict__)
    return tensor


def initialize(parallel: ParallelModel, init: Initializer | None, names: Collection[str], *, broadcast: bool) -> None:
    """Set the values of the model, of which the tensors with ``names`` were on the meta device. Collective.

    As its constructor, the methods ``reset_parameters`` of its modules do it, inner ones first; then ``init``, a
    function or the path of weights. ``broadcast``: rank 0's values are sent to all ranks. Raises SetupError if a tensor
    is left unset, or ``init`` puts another one in the place of a parameter.
    """
    parameters = parallel.parameters()
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(parallel.model).items() if name in names}
    whole = _WholeParameters(parallel, broadcast)
    collects = gc.isenabled()
    gc.disable()  # so that a view dies at the same operation on all ranks
    try:
        with torch.no_grad(), whole:
            _reset(parallel.model, {id(tensor) for tensor, _ in before.values()})
            if callable(init):
                init(parallel.model)
    finally:
        if collects:
            gc.enable()
    with torch.no_grad():
        whole.close()
        if not callable(init) and init != RESETS:
            load_weights(parallel, cast("str", init))
    after = _tensors(parallel.model)
    for name, parameter in parallel.parameters().items():
        if parameter is not parameters[name]:
            raise SetupError(f"init= puts another tensor in the place of {name!r}: set the values of the parameter")
    if broadcast:
        distributed.broadcast(tensor.data for tensor in after.values() if not whole.is_sharded(tensor))
    unset = [name for name, (tensor, version) in before.items() if _is_unset(after[name], tensor, version)]
    if found := sorted({name for names_of_rank in process_group.all_gather(unset) for name in names_of_rank}):
        raise SetupError(f"init= leaves {found[0]!r} of the model unset, which is on the meta device: set its values")


def load_weights(parallel: ParallelModel, path: str | os.PathLike[str]) -> None:
    """Load the weights at ``path`` into a model; each rank reads the chunks that it needs. Collective."""
    from flk_runtime.checkpoint.files import Weights  # they import more than most starts need
    from flk_runtime.checkpoint.load import SavedObject

    parallel.state.read(SavedObject(cast("SavedCheckpoint", Weights(os.fspath(path))), "model", {}))


def _reset(model: nn.Module, unset: Collection[int]) -> None:
    """Call ``reset_parameters`` of the modules that hold tensors with the ids ``unset``, and of those around them."""
    done: set[nn.Module] = set()
    for module in inner_first(model):
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(id(tensor) in unset for tensor in own) or not done.isdisjoint(module.children()):
            done.add(module)
            methods = (getattr(module, name, None) for name in _RESET_METHODS)
            reset = next((method for method in methods if callable(method)), None)
            if reset:
                reset()


class _WholeParameters(TorchFunctionMode):
    """While it is active, operations on a sharded parameter of the model get a whole tensor in its place."""

    def __init__(self, parallel: ParallelModel, broadcast: bool) -> None:
        super().__init__()
        self._parallel, self._broadcast = parallel, broadcast
        self._sharded = {
            id(parameter): parameter for parameter in parallel.parameters().values() if is_sharded(parameter)
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
            self._open[id(leaf)] = self._parallel.full_tensor(leaf).clone()
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
                distributed.broadcast([full])
            parameter = self._sharded[key]
            parameter.copy_(self._parallel.local_shard(parameter, full))
            del self._open[key], self._aliases[address]


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_unset(tensor: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    """Whether memory that was allocated, and filled with NaN if it is of floating point, has got no values."""
    if tensor.is_floating_point():
        return bool(local(tensor).isnan().any())
    return tensor is before and tensor._version == version


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
