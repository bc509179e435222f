"""Initialization before sharding: parameters on the meta device get values, and all ranks get rank 0's."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.errors import SetupError

Initializer = Callable[[nn.Module], object] | str | os.PathLike[str]
RESETS = "reset_parameters"  # the initializer that says that the methods of this name set all values
_RESET_METHODS = (RESETS, "_reset_parameters")  # nn.MultiheadAttention has the second


def meta_names(model: nn.Module) -> list[str]:
    """The names of the parameters and buffers of ``model`` that are on the meta device."""
    return [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]


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


class Materializer:
    """Materializes a model block by block, so that no rank ever holds all of it on its device.

    A tensor on the meta device gets memory, and its values from ``reset_parameters`` of its module. Modules are reset
    in the order of registration, inner ones first, as their constructors would do it, so that the values are the same
    as in a model built on a real device. A tied parameter is reset by each of its modules, and the last one's values
    stay. Then everything is moved to ``device``. The name is torchdistX's ``materialize_module``.

    ``blocks`` are the modules that are sharded on their own, beside the model itself. ``init_follows``: the model's own
    initialization will set tensors that no ``reset_parameters`` sets.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        device: torch.device,
        *,
        init_follows: bool = False,
    ) -> None:
        self._model, self._blocks, self._device = model, {id(block) for block in blocks}, device
        self._init_follows = init_follows
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._visited: set[int] = set()
        self._pending: list[nn.Module] = []  # visited, and not yet part of a finished block
        self._materialized: dict[int, _Materialized] = {}  # in blocks not finished, by the id of the meta tensor
        self._resets = 0  # modules that have been reset

    def run(self, shard: Callable[[nn.Module], None], *, broadcast: bool) -> None:
        """Materialize all blocks, inner ones first and the model last, and call ``shard`` with each.

        ``broadcast``: send rank 0's values to all ranks before; then the call is collective. Unless ``init_follows``,
        raises SetupError if a tensor on the meta device has no ``reset_parameters`` that sets it.
        """
        self._visit(self._model, shard, broadcast)

    def _visit(self, module: nn.Module, shard: Callable[[nn.Module], None], broadcast: bool) -> bool:
        """Whether a block was finished: ``module`` itself, or one inside it."""
        if id(module) in self._visited:
            return False
        self._visited.add(id(module))
        begin, resets, finished = len(self._pending), self._resets, False
        for child in list(module.children()):
            finished |= self._visit(child, shard, broadcast)
        self._pending.append(module)
        self._reset(module, child_reset=self._resets > resets, finished=finished)
        if id(module) not in self._blocks and module is not self._model:
            return finished
        self._check_values({id(module) for module in self._pending[begin:]})
        self._move(self._pending[begin:], broadcast)
        del self._pending[begin:]
        shard(module)
        return True

    def _reset(self, module: nn.Module, *, child_reset: bool, finished: bool) -> None:
        meta = {name: tensor for name, tensor in _tensors(module).items() if tensor.is_meta}
        if not meta and not child_reset:
            return
        self._resets += 1
        reset = reset_method(module)
        if finished and self._init_follows:
            reset = None  # it may set parameters of blocks that are already sharded
        if finished and not meta and reset is not None:
            raise SetupError(
                f"reset_parameters() of {self._describe(module)} sets parameters of blocks that are already sharded: "
                "pass it as init=, as in parallelize(model, optimizer, init=lambda model: model.reset_parameters())"
            )
        for name, tensor in meta.items():
            self._allocate(module, name, tensor, never_set=reset is None and not tensor.is_floating_point())
        if reset is not None:
            with torch.no_grad():
                reset()

    def _allocate(self, module: nn.Module, name: str, meta: torch.Tensor, never_set: bool) -> None:
        """Give a meta tensor memory, filled with NaN so that unset values are noticed. A tied tensor gets it once."""
        if id(meta) not in self._materialized:
            tensor = torch.empty_like(meta, device=self._device, requires_grad=False)
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            if isinstance(meta, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=meta.requires_grad)
                tensor.__dict__.update(meta.__dict__)
            self._materialized[id(meta)] = _Materialized(meta, tensor, module, name, never_set)
        tensor = self._materialized[id(meta)].tensor
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor

    def _check_values(self, modules: Collection[int]) -> None:
        """Raise SetupError if memory of ``modules``, the ids of a block's modules, was not set as meant.

        Forget its tensors, which must not outlive their block. One outside of the block may still be tied to another.
        """
        finished = {key: made for key, made in self._materialized.items() if id(made.module) in modules}
        for key in finished:
            del self._materialized[key]
        for made in () if self._init_follows else finished.values():
            if made.never_set or (made.tensor.is_floating_point() and bool(made.tensor.isnan().any())):
                raise SetupError(
                    f"{made.name!r} of {self._describe(made.module)} is on the meta device, and no reset_parameters() "
                    "sets it: pass init=, a function that initializes the model, or define that method in its class"
                )

    def _move(self, modules: list[nn.Module], broadcast: bool) -> None:
        moved: dict[int, torch.Tensor] = {}
        for module in modules:
            for name, tensor in _tensors(module).items():
                if id(tensor) in moved:
                    continue
                if tensor.device != self._device:
                    if isinstance(tensor, nn.Parameter):
                        tensor.data = tensor.data.to(self._device)  # the same object, so that a tied one moves once
                    else:
                        tensor = module._buffers[name] = tensor.to(self._device)
                moved[id(tensor)] = tensor
                if broadcast:
                    dist.broadcast(tensor.data, src=0)

    def _describe(self, module: nn.Module) -> str:
        return f"{self._names[id(module)]} ({type(module).__name__})"


@dataclass
class _Materialized:
    """A tensor that was on the meta device."""

    meta: torch.Tensor  # kept alive, so that its id stays its own
    tensor: torch.Tensor
    module: nn.Module
    name: str
    never_set: bool  # an integer tensor of a module without reset_parameters: NaN cannot show that it is not set


def reset_method(module: nn.Module) -> Callable[[], None] | None:
    """The method of ``module`` that sets its parameters and buffers; None if it has none."""
    methods = (getattr(module, name, None) for name in _RESET_METHODS)
    return next((method for method in methods if callable(method)), None)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of ``module`` itself, without its children's, by name."""
    return {
        name: tensor
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    }
