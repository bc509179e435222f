"""Gradients of a sharded model, between the backward passes and the optimizer.

A backward pass leaves gradients of full parameters, and FSDP2 reduces them to gradients of the shards. A script, which
sees one parameter, and an optimizer, which has the shards, do not see the first ones.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import user_name
from flk_runtime.contract.ranges import numbered
from flk_runtime.distributed import parameters_in, process_group
from flk_runtime.errors import SetupError
from flk_runtime.parallel.between_passes import BETWEEN_PASSES
from flk_runtime.parallel.model import UNAVERAGED
from flk_runtime.parallel.records import drop_unreduced, is_unreduced, sharded_parameters
from flk_runtime.system.bits import is_compared

_MARK = "_flk_drops"  # attribute of a zero_grad of this module


def extend_zero_grad(kind: type[nn.Module]) -> None:
    """Have ``zero_grad`` of the modules of a class drop all gradients, at any time.

    After a forward pass full parameters are in the place of shards, so that the shards would keep theirs.
    """
    if hasattr(kind.zero_grad, _MARK):
        return
    plain = kind.zero_grad

    @functools.wraps(plain)
    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        with BETWEEN_PASSES.paused():
            plain(module, set_to_none)
            for each in sharded_parameters(module):
                drop_unreduced(each)
                if set_to_none:
                    each.sharded_param.grad = None
                elif each.sharded_param.grad is not None:
                    each.sharded_param.grad.detach().zero_()

    setattr(zero_grad, _MARK, True)
    kind.zero_grad = zero_grad  # type: ignore[method-assign, assignment]


class UnreducedGradients:
    """Refuses a step without the gradients of passes in `no_sync`, and has ``zero_grad`` of an optimizer drop them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.may_exist = False  # since there was a pass in no_sync

    def watch(self, optimizer: Optimizer) -> None:
        """Watch the steps of ``optimizer``, and its ``zero_grad``."""
        if optimizer in self._watched:
            return
        self._watched.add(optimizer)
        plain = optimizer.zero_grad

        @functools.wraps(plain)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            with BETWEEN_PASSES.paused():
                plain(*args, **kwargs)
            for each in self._of(optimizer):
                drop_unreduced(each)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._check)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if any(map(is_unreduced, self._of(optimizer))):
            raise SetupError(UNAVERAGED)

    def _of(self, optimizer: Optimizer) -> list[Any]:
        """The records of the parameters of ``optimizer``; none while there can be no such gradient."""
        if not self.may_exist:
            return []
        own = set(parameters_in(optimizer))
        return [each for each in sharded_parameters(self._model) if each.sharded_param in own]


class SameUse:
    """Refuses a backward pass in which the ranks have used different parameters of a unit.

    FSDP2 joins the gradients that a rank has, so gradients of different parameters would be added to each other. The
    ranks compare them in the first passes and now and then; a use that they have not compared is refused in between.
    """

    def __init__(self, number: int, group: Any, model: nn.Module) -> None:
        """``number``: of the unit in ``model``; ``group``: FSDP2's, of its parameters."""
        self._number, self._group, self._model = number, group, model
        self._passes = 0
        self._agreed: set[tuple[bool, ...]] = set()
        plain = group.post_backward

        def post_backward(*unused: Any) -> None:
            if group.reduce_grads:
                self._check()
            plain(*unused)

        group.post_backward = post_backward

    def _check(self) -> None:
        used = tuple(map(is_unreduced, self._group.fsdp_params))
        self._passes += 1
        if is_compared(self._passes):
            number, key = self._number, hash(used) >> 1
            # Of all ranks, in one message that does not grow with them.
            *least, last, largest = process_group.maximum(-number, -key, number, key)
            if least != [-last, -largest]:
                names = process_group.all_gather(self._names(used))
                for each in sharded_parameters(self._model):
                    drop_unreduced(each)  # which no rank could reduce
                raise SetupError(f"{_difference(names)}: {_ADVICE}")
            self._agreed.add(used)
        elif used not in self._agreed and not self._are_all(used):
            rank, most = dist.get_rank(), max(self._agreed, key=sum)
            name = next(iter(set(self._names(most)) ^ set(self._names(used))))
            raise SetupError(
                f"{name!r} has {'a' if name in self._names(used) else 'no'} gradient on rank {rank}, unlike in the "
                f"passes before, and other ranks may differ: {_ADVICE}"
            )

    def _are_all(self, used: Iterable[bool]) -> bool:
        """Whether these are all parameters that are trained: parameters that a script has unfrozen meanwhile, too.

        If another rank has not used all, that rank raises the error.
        """
        records = self._group.fsdp_params
        return all(is_used for each, is_used in zip(records, used, strict=True) if each.sharded_param.requires_grad)

    def _names(self, used: Iterable[bool]) -> list[str]:
        records = self._group.fsdp_params
        return [user_name(self._model, each._param_fqn) for each, is_used in zip(records, used, strict=True) if is_used]


_ADVICE = "pass find_unused_parameters=True to parallelize if ranks use different parameters, as experts"


def _difference(used: list[list[str]]) -> str:
    """In words, the first parameter of those that the ranks have used, by rank, that not all have used."""
    names = dict.fromkeys(name for each in used for name in each)
    name = next(name for name in names if any(name not in each for each in used))
    having = [rank for rank, each in enumerate(used) if name in each]
    others = [rank for rank, each in enumerate(used) if name not in each]
    return f"{name!r} has a gradient on {numbered('rank', having)} and none on {numbered('rank', others)}"
