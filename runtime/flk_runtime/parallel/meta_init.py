"""From the model that a script builds to the same numbers on every rank: meta parameters, devices, rank 0's values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.errors import SetupError

_METHODS = ("reset_parameters", "_reset_parameters")  # the second is what nn.MultiheadAttention has


class Materializer:
    """Makes the units of a model ready to be sharded, one at a time: no rank ever holds the whole on its device.

    A parameter on the meta device gets memory, and its numbers from the ``reset_parameters`` of its module: in the
    order in which modules are registered, inner ones first, as their constructors would have done it. A tied
    parameter is set by each of its modules, so the last one's numbers stay. Everything moves to the device, and rank
    0's values go to all.
    """

    def __init__(self, model: nn.Module, units: Collection[nn.Module], device: torch.device) -> None:
        self._model, self._units, self._device = model, {id(unit) for unit in units}, device
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._visited: set[int] = set()
        self._open: list[nn.Module] = []  # visited, and not yet in a finished unit
        self._made: dict[int, _Made] = {}  # in units that are not finished, by the id of the meta tensor
        self._resets = 0  # how many modules have had tensors on the meta device

    def run(self, finish: Callable[[nn.Module], None], *, broadcast: bool) -> None:
        """Make everything ready; call ``finish`` with each unit, inner ones first, and the model last."""
        self._visit(self._model, finish, broadcast)

    def _visit(self, module: nn.Module, finish: Callable[[nn.Module], None], broadcast: bool) -> bool:
        """Whether a unit below ``module``, or itself, has been finished."""
        if id(module) in self._visited:
            return False
        self._visited.add(id(module))
        begin, resets, finished = len(self._open), self._resets, False
        for child in list(module.children()):
            finished |= self._visit(child, finish, broadcast)
        self._open.append(module)
        self._fill(module, below=self._resets > resets, finished=finished)
        if id(module) not in self._units and module is not self._model:
            return finished
        self._check()
        self._place(self._open[begin:], broadcast)
        del self._open[begin:]
        finish(module)
        return True

    def _fill(self, module: nn.Module, *, below: bool, finished: bool) -> None:
        meta = {name: tensor for name, tensor in _tensors(module).items() if tensor.is_meta}
        if not meta and not below:
            return
        self._resets += 1
        reset = next((getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None)
        if finished and not meta and reset is not None:
            raise SetupError(
                f"the reset_parameters() of {self._where(module)} sets parameters of blocks that are sharded before "
                "it: build the model on a real device, or let each block set its own"
            )
        for name, tensor in meta.items():
            self._memory(module, name, tensor, hopeless=reset is None and not tensor.is_floating_point())
        if reset is not None:
            with torch.no_grad():
                reset()

    def _memory(self, module: nn.Module, name: str, old: torch.Tensor, hopeless: bool) -> None:
        """Give the tensor memory that is NaN wherever nobody sets it. A tied one gets it once."""
        if id(old) not in self._made:
            new = torch.empty_like(old, device=self._device, requires_grad=False)
            if new.is_floating_point():
                new.fill_(torch.nan)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
            self._made[id(old)] = _Made(old, new, module, name, hopeless)
        new = self._made[id(old)].new
        if isinstance(new, nn.Parameter):
            module._parameters[name] = new
        else:
            module._buffers[name] = new

    def _check(self) -> None:
        """Make sure that all memory has been set, and forget it: it must not outlive its unit."""
        for made in self._made.values():
            if made.hopeless or (made.new.is_floating_point() and bool(made.new.isnan().any())):
                raise SetupError(
                    f"{made.name!r} of {self._where(made.module)} is on the meta device, and no reset_parameters() "
                    "sets it: write that method in its class, or build the model on a real device"
                )
        self._made.clear()

    def _place(self, modules: list[nn.Module], broadcast: bool) -> None:
        given: dict[int, torch.Tensor] = {}
        for module in modules:
            for name, tensor in _tensors(module).items():
                if id(tensor) in given:
                    continue
                if tensor.device != self._device:
                    if isinstance(tensor, nn.Parameter):
                        tensor.data = tensor.data.to(self._device)  # the same object: a tied one moves once
                    else:
                        tensor = module._buffers[name] = tensor.to(self._device)
                given[id(tensor)] = tensor
                if broadcast:
                    dist.broadcast(tensor.data, src=0)

    def _where(self, module: nn.Module) -> str:
        return f"{self._names[id(module)]} ({type(module).__name__})"


@dataclass(frozen=True)
class _Made:
    """A tensor that was on the meta device, and what it has become."""

    old: torch.Tensor
    new: torch.Tensor
    module: nn.Module
    name: str
    hopeless: bool  # of whole numbers, and in a module that can't set it


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that are directly in ``module``, by their names in it."""
    return {
        name: tensor
        for each in (module._parameters, module._buffers)
        for name, tensor in each.items()
        if tensor is not None
    }
