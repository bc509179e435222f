"""Model state: the bytes of parameters, gradients and optimizer state that rank 0 holds under each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from flk_runtime.parallel.blocks import shardable_blocks


@dataclass(frozen=True)
class Parameter:
    """A parameter without its data."""

    shape: tuple[int, ...]
    size: int  # of an element, in bytes
    trained: bool
    state: tuple[tuple[int, int], ...] = ()  # of the optimizer: (elements, bytes of an element) of each tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def local_numel(self, shards: int) -> int:
        """Number of elements that rank 0 of ``shards`` holds under FSDP2, which splits the first dimension."""
        if shards == 1:
            return self.numel
        rows = -(-self.shape[0] // shards)
        return rows * (self.numel // self.shape[0]) if self.shape[0] else 0


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: the parameters of a block, or all that are in no block."""

    block: int  # index of the block; -1 for the rest
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def full_bytes(self, dtype_size: int | None = None) -> int:
        """Bytes of all parameters, in their own dtype or in one with elements of ``dtype_size`` bytes."""
        return sum(each.numel * (dtype_size or each.size) for each in self.parameters)

    def trained_bytes(self, dtype_size: int | None = None) -> int:
        """Bytes of all parameters that have gradients, as `full_bytes` counts them."""
        return sum(each.numel * (dtype_size or each.size) for each in self.parameters if each.trained)


@dataclass(frozen=True)
class State:
    """Bytes on rank 0."""

    parameters: int
    gradients: int
    optimizer: int


def units_of(model: nn.Module, blocks: Sequence[nn.Module], *optimizers: Optimizer) -> list[Unit]:
    """The units of ``model``: the units of its blocks in their order, then the rest."""
    states = {key: sizes for each in optimizers for key, sizes in optimizer_states(each).items()}
    units: list[Unit] = []
    seen: set[int] = set()
    sharded = {id(block) for block in shardable_blocks(model, blocks)}
    for index, block in enumerate(blocks):
        if id(block) in sharded:
            own = [each for each in block.parameters() if id(each) not in seen]
            seen.update(map(id, own))
            units.append(Unit(index, _described(own, states)))
    rest = [each for each in model.parameters() if id(each) not in seen]
    if rest:
        units.append(Unit(-1, _described(rest, states)))
    return units


def optimizer_states(optimizer: Optimizer) -> dict[int, tuple[tuple[int, int], ...]]:
    """The tensors of the optimizer's state by the id of the parameter, from one step on tensors without data.

    Of the parameters of a group that have the same shape and dtype, one makes the step for all.
    """
    parameters = [(number, each) for number, group in enumerate(optimizer.param_groups) for each in group["params"]]
    chosen: dict[tuple[object, ...], nn.Parameter] = {}
    for number, each in parameters:
        each.grad = None
        if each.requires_grad:
            chosen.setdefault((number, each.shape, each.dtype), each)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for each in chosen.values():
            each.grad = torch.empty_like(each)
        optimizer.step()
    sizes = {
        key: tuple(
            (value.numel(), value.element_size())
            for value in optimizer.state.get(each, {}).values()
            if isinstance(value, torch.Tensor)
        )
        for key, each in chosen.items()
    }
    return {id(each): sizes.get((number, each.shape, each.dtype), ()) for number, each in parameters}


def model_state(units: Iterable[Unit], shards: int) -> State:
    """Parameters, gradients and optimizer state on rank 0, of ``shards`` ranks that share them (1: it holds all)."""
    held = gradients = optimizer = 0
    for unit in units:
        for each in unit.parameters:
            numel = each.local_numel(shards)
            held += numel * each.size
            if each.trained:
                gradients += numel * each.size
            if numel:  # without a gradient, the optimizer makes no state
                optimizer += sum(
                    (numel if elements == each.numel else elements) * size for elements, size in each.state
                )
    return State(held, gradients, optimizer)


def _described(
    parameters: Iterable[nn.Parameter], states: dict[int, tuple[tuple[int, int], ...]]
) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(tuple(each.shape), each.element_size(), each.requires_grad, states.get(id(each), ()))
        for each in parameters
    )
