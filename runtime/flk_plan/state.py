"""Model state: the bytes of parameters, gradients and optimizer state that rank 0 holds under each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from flk_plan.fake import FakeMode
from flk_plan.hardware import Gpu
from flk_plan.trace import OUTSIDE, MemoryCounter
from flk_runtime.errors import SetupError
from flk_runtime.parallel import Precision
from flk_runtime.parallel.blocks import kept_units, sharded_units


@dataclass(frozen=True)
class Parameter:
    """A parameter without its data."""

    shape: tuple[int, ...]
    size: int  # of an element, in bytes
    trained: bool
    state: tuple[tuple[int, int], ...] = ()  # of the optimizer: (elements, bytes of an element) of each tensor
    place: int = 0  # among the model's parameters, of which the one whose gradient is ready first is the last

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
    """Parameters that FSDP gathers and reduces together. The root unit has all that are in no other one."""

    block: int  # index of the block that it is, or is a part of; OUTSIDE if there is none
    parameters: tuple[Parameter, ...]
    is_kept: bool = False  # between the forward and the backward pass, whatever the strategy

    def full_bytes(self, dtype_size: int | None, shards: int = 1, *, trained_only: bool = False) -> int:
        """Bytes of all parameters, with their padding in ``shards``, or of those that have gradients.

        They are in their own dtype (None) or in one with elements of ``dtype_size`` bytes.
        """
        chosen = [each for each in self.parameters if each.trained or not trained_only]
        return sum(shards * each.local_numel(shards) * (dtype_size or each.size) for each in chosen)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the state of a model and its optimizers on rank 0."""

    parameters: int
    gradients: int
    optimizer: int


def units_of(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    states: Mapping[int, tuple[tuple[int, int], ...]],
    precision: Precision | None = None,
    *,
    ends: bool = True,
) -> list[Unit]:
    """The units that FSDP makes of ``model``, in the order of registration; the root is first.

    ``blocks`` are the parts that are traced; ``states`` are the sizes of the optimizers' states by id of the parameter.
    ``ends``: see `sharded_units`. Gradients become ready in the reverse order of registration.
    """
    place = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    part: dict[int, int] = {}
    for index, block in enumerate(blocks):
        for module in block.modules():
            part.setdefault(id(module), index)
    sharded = sharded_units(model, blocks, precision, ends=ends)
    chosen = {id(module) for module in (*sharded, model)}
    kept = kept_units(model, sharded, ends=ends)
    units: list[Unit] = []
    seen: set[int] = set()
    for module in reversed([each for each in model.modules() if id(each) in chosen]):  # inner ones before outer ones
        own = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        if own:
            described = tuple(_described(each, states.get(id(each), ()), place[id(each)]) for each in own)
            units.append(Unit(part.get(id(module), OUTSIDE), described, module in kept))
    return units[::-1]


def _described(each: nn.Parameter, state: tuple[tuple[int, int], ...], place: int) -> Parameter:
    return Parameter(tuple(each.shape), each.element_size(), each.requires_grad, state, place)


@dataclass(frozen=True)
class OptimizerSizes:
    """The sizes of the tensors that an optimizer keeps, and of the temporary tensors of a step."""

    states: dict[int, tuple[tuple[int, int], ...]]  # by id of the parameter: (elements, bytes of an element) of each
    of_all: float = 0.0  # temporary bytes for each byte of all parameters, which foreach kernels update together
    of_largest: float = 0.0  # temporary bytes for each byte of the largest parameter, if it updates one after the other


def optimizer_sizes(optimizer: Optimizer, gpu: Gpu) -> OptimizerSizes:
    """Sizes of the tensors of ``optimizer``, from two steps on tensors without data. The second one has its state.

    Of the parameters of a group that have the same shape and dtype, one makes the step for all. torch uses foreach
    kernels on a GPU if the optimizer does not say otherwise. Raises SetupError if it makes no step without data, such
    as LBFGS, whose steps call the model as often as its values ask for.
    """
    parameters = [(number, each) for number, group in enumerate(optimizer.param_groups) for each in group["params"]]
    chosen: dict[tuple[object, ...], nn.Parameter] = {}
    for number, each in parameters:
        each.grad = None
        if each.requires_grad:
            chosen.setdefault((number, each.shape, each.dtype), each)
    unset = [group for group in optimizer.param_groups if group.get("foreach", True) is None and not group.get("fused")]
    for group in unset if gpu.overlaps else ():
        group["foreach"] = True
    foreach = any(group.get("foreach") for group in optimizer.param_groups)
    counter = MemoryCounter(gpu, lambda: False)
    try:
        with FakeMode(1), torch.no_grad():  # the number of a step: some optimizers divide by it
            for each in chosen.values():
                each.grad = torch.empty_like(each)
            optimizer.step()
            with counter:
                optimizer.step()
    except Exception as error:
        kind, text = type(optimizer).__name__, str(error).partition("\n")[0]
        raise SetupError(f"plan cannot make a step of {kind} on tensors without data: {text}") from error
    for group in unset:
        group["foreach"] = None
    temporary = counter.start_segment().peak
    sizes = {
        key: tuple(
            (value.numel(), value.element_size())
            for value in optimizer.state.get(each, {}).values()
            if isinstance(value, torch.Tensor)
        )
        for key, each in chosen.items()
    }
    used = [each.numel() * each.element_size() for each in chosen.values()]
    return OptimizerSizes(
        {id(each): sizes.get((number, each.shape, each.dtype), ()) for number, each in parameters},
        temporary / sum(used) if used and foreach else 0.0,
        temporary / max(used) if used and not foreach else 0.0,
    )


def model_state(units: Iterable[Unit], shards: int) -> StateBytes:
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
    return StateBytes(held, gradients, optimizer)
