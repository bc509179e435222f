"""SkippedUnits: sharded units, such as blocks, that a forward pass leaves out on some ranks, as LayerDrop does.

FSDP2 gathers the parameters of a unit when it is called. A rank that leaves one out would wait for the others, or be
given the parameters of another unit of the same size.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.contract.ranges import numbered
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel.records import groups_of
from flk_runtime.system import pytree


class SkippedUnits:
    """Has all ranks gather the same units in the same order in each forward pass with gradients, or refuses the pass.

    In the first pass the ranks compare which unit comes next, before each unit. That gives the order of later passes,
    which each rank compares with its own, without communication.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, Any], *, may_skip: bool) -> None:
        """``units``: what is sharded in ``model``, by name. ``may_skip``: ranks may leave units out."""
        self._names, self._units, self._may_skip = list(units), list(units.values()), may_skip
        self._order: list[int] = []  # of the first pass
        self._place = -1  # in the order; -1: no pass is going on
        self._is_first = True
        self._passed: list[torch.Tensor] = []  # what has gone through units that were left out
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for number, unit in enumerate(self._units):
            # FSDP2's own hook calls it, as it does `FullParameters`.
            (group,) = groups_of(unit._get_fsdp_state())
            group.pre_forward = functools.partial(self._enter, number, group.pre_forward)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: Any) -> None:
        self._place, self._passed = 0 if torch.is_grad_enabled() else -1, []
        if self._is_first:
            self._order = []

    def _enter(self, number: int, begin: Any, module: nn.Module, *arguments: Any) -> Any:
        if self._place < 0 or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return begin(module, *arguments)
        self._reach(number)
        if self._may_skip and not self._passed:
            given = [leaf for leaf in pytree.leaves(arguments) if _is_float(leaf)]
            if given and not any(each.requires_grad for each in given):
                # FSDP2 reduces the gradients of a unit when its inputs have theirs, else after those of all other
                # units. A rank that leaves the unit out cannot know which.
                self._passed.append(torch.zeros((), device=given[0].device, requires_grad=True))
        return begin(module, *(self._joined(arguments) if self._passed else arguments))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, _: nn.Module, arguments: Any, output: Any) -> Any:
        if self._place < 0:
            return output
        self._reach(len(self._units))
        if self._is_first:
            self._is_first = False
            for number in range(len(self._units)):
                if self._may_skip and number not in self._order:  # no rank has called it yet
                    self._order.insert(self._order.index(number - 1) + 1 if number else 0, number)
        self._place = -1
        return self._joined(output) if self._passed else output

    def _reach(self, number: int) -> None:
        """Take part in the gathering of the units before ``number``, which is the next on this rank."""
        if self._is_first:
            while (least := self._first_of_all(number)) != number:
                self._gather(least)
            return
        rest = self._order[self._place :]
        at_end = number == len(self._units)
        if not at_end and number not in rest:
            raise SetupError(
                f"{self._name(number)} is called in another place than in the first forward pass, so ranks could wait "
                "for each other: call blocks in one order, or use strategy ddp"
            )
        skipped = rest if at_end else rest[: rest.index(number)]
        if skipped and not self._may_skip:
            raise SetupError(
                f"{self._name(skipped[0])} is left out on rank {dist.get_rank()}, and the first forward pass called "
                f"it: {_ADVICE}"
            )
        for each in skipped:
            self._gather(each)
        self._place += len(skipped) + 1

    def _first_of_all(self, number: int) -> int:
        """The first of the units that come next on the ranks, as registered. Collective."""
        # Of all ranks, in one message that does not grow with their number.
        negative, last = process_group.maximum(-number, number)
        least = -negative
        if least != last and not self._may_skip:
            numbers = process_group.all_gather(number)
            these, those = (
                numbered("rank", [rank for rank, each in enumerate(numbers) if each == one]) for one in (least, last)
            )
            raise SetupError(f"{self._name(least)} comes next on {these}, and {self._name(last)} on {those}: {_ADVICE}")
        if least < len(self._units):
            self._order.append(least)
        return least

    def _gather(self, number: int) -> None:
        """Do what FSDP2 does for a call of a unit, also in the backward pass, but compute nothing."""
        unit = self._units[number]
        if any(each in self._units for each in unit.modules() if each is not unit):
            raise SetupError(
                f"{self._name(number)} is left out by some ranks and has sharded blocks inside: name smaller blocks"
            )
        state = unit._get_fsdp_state()
        place, self._place = self._place, -1  # this is no call of the pass
        try:
            given, _ = state._pre_forward(unit, (torch.zeros((), device=state._device, requires_grad=True),), {})
            self._passed.append(state._post_forward(unit, given, given[0] * 1))
        finally:
            self._place = place

    def _joined(self, tree: Any) -> Any:
        """``tree`` with a tensor from which a backward pass goes through the units that were left out."""
        wanted = next((each for each in pytree.leaves(tree) if _is_float(each)), None)
        if wanted is None:
            return tree
        joined = _Join.apply(wanted, *self._passed)  # type: ignore[no-untyped-call]
        self._passed = []
        return pytree.map_leaves(tree, lambda leaf: joined if leaf is wanted else leaf)

    def _name(self, number: int) -> str:
        return f"block {self._names[number]!r}" if number < len(self._names) else "the end of the forward pass"


_ADVICE = (
    "ranks that call different blocks would wait for each other: pass find_unused_parameters=True to parallelize if "
    "blocks are left out, as by LayerDrop"
)


class _Join(torch.autograd.Function):
    """A tensor as it is, whose gradient also begins backward passes through other tensors, of shape ()."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = others
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.zeros_like(each) for each in ctx.others)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
