"""Watch: follows the steps of all optimizers of a script, by torch's hooks for all optimizers and modules."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flk_runtime.checkpoint import CheckpointManager
from flk_runtime.data import EpochLoader, LoaderOptions
from flk_runtime.distributed import comm_device, parameters_in, process_group
from flk_runtime.system import pytree
from flk_runtime.training.step.batches import Batches
from flk_verify.random_numbers import SameNumbers

_WRAPPERS: Final = re.compile(r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # SyncBatchNorm is none of them
Tensors = list[torch.Tensor | None]


@dataclass
class Step:
    """What an optimizer begins a step with. Tensors are whole, on the CPU of rank 0, in the order of its parameters."""

    optimizer: int  # in the order of first steps
    number: int  # of its step, from 1
    names: list[str]
    parameters: list[torch.Tensor]
    gradients: Tensors
    mean: Tensors  # over the ranks, of the gradients that each rank has for itself; None for shards
    facts: dict[str, Any]  # of the passes since the step before; `Watch` makes them


class Done(BaseException):
    """Ends the script after the last step that is compared."""


class Side(Protocol):
    """One of the two that are compared: the ranks, or the whole model in one process."""

    def before(self, step: Step) -> None:
        """An optimizer begins a step. Collective."""

    def after(self, optimizer: Optimizer, step: Step) -> None:
        """It has made the step. Collective."""

    def loader(self, number: int, options: LoaderOptions) -> LoaderOptions:
        """The options of a loader, for those that the script gives."""


class Watch:
    """Shows its side each step of an optimizer and each loader, and ends the script after ``steps`` steps."""

    def __init__(self, steps: int, side: Side) -> None:
        self._steps, self._side = steps, side
        self._counts: dict[Optimizer, int] = {}
        self._inside: list[FrameType] = []  # open calls of steps; one may call others, also its base class
        self._depth = 0  # of calls of modules
        self._modules: list[nn.Module] = []  # which the script calls
        self._inputs: list[list[float]] = []  # of their calls since the step before
        self._numbers: SameNumbers | None = None
        self._step: Step | None = None

    @property
    def compared(self) -> int:
        """The number of steps that the optimizer with most of them has made."""
        return max(self._counts.values(), default=0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, all steps are followed. Random numbers are equal from the first pass or batch of a loader on."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        begin, make, loaders = CheckpointManager._set_rng, Batches.make_loader, itertools.count()

        def begin_draws(manager: CheckpointManager) -> None:
            begin(manager)
            self._begin_draws().begin()

        def make_loader(batches: Batches, dataset: Any, options: LoaderOptions, part: Any = None) -> EpochLoader:
            return make(batches, dataset, self._side.loader(next(loaders), options), part)

        CheckpointManager._set_rng = begin_draws  # type: ignore[method-assign, assignment]
        Batches.make_loader = make_loader  # type: ignore[method-assign, assignment]
        try:
            with torch.compiler.set_stance("force_eager"):  # torch compiles nothing below `SameNumbers`
                yield
        finally:
            if self._numbers:
                self._numbers.__exit__(None, None, None)

    def _begin_draws(self) -> SameNumbers:
        if self._numbers is None:
            self._numbers = SameNumbers()
            self._numbers.__enter__()
        return self._numbers

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._begin_draws()
            if not any(module is each for each in self._modules):
                self._modules.append(module)

    def _leave(self, module: nn.Module, inputs: Any, named: Any, output: Any = None) -> None:  # none if it has raised
        self._depth -= 1
        if self._depth == 0 and torch.is_grad_enabled():
            tensors = [each for each in pytree.leaves([inputs, named]) if isinstance(each, torch.Tensor)]
            self._inputs.extend(_sums(each) for each in tensors if not isinstance(each, DTensor))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        call = sys._getframe(1)  # torch's, around the step
        stack = [frame for frame, _ in traceback.walk_stack(call)]
        self._inside = [frame for frame in self._inside if frame in stack]  # a step that has raised has no frame left
        self._inside.append(call)
        if len(self._inside) > 1:
            return
        number = self._counts.setdefault(optimizer, 0) + 1
        if number > self._steps:
            end()
        self._counts[optimizer] = number
        parameters = parameters_in(optimizer)
        gradients, mean = _gradients(parameters)
        whole_parameters = [whole(each) for each in parameters]
        place, names, facts = list(self._counts).index(optimizer), self._names(parameters), self._facts(optimizer)
        self._step = Step(place, number, names, whole_parameters, gradients, mean, facts)
        self._side.before(self._step)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del self._inside[self._inside.index(sys._getframe(1)) :]
        if self._inside or self._step is None:
            return
        if self._numbers:
            self._step.facts["compute_eps"] = self._numbers.eps  # of the step too: Muon computes in bfloat16
            self._numbers.begin_step()
        self._side.after(optimizer, self._step)
        self._inputs = []
        if self._steps > 1 and min(self._counts.values()) >= self._steps:
            end()

    def _names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The names of parameters in the modules that the script calls; else their places in the optimizer."""
        pairs = [pair for module in self._modules for pair in module.named_parameters()]
        named = {id(each): _WRAPPERS.sub("", name) for name, each in reversed(pairs)}
        return [named.get(id(each), f"parameter {number}") for number, each in enumerate(parameters)]

    def _facts(self, optimizer: Optimizer) -> dict[str, Any]:
        """The facts by which causes are told apart. Collective."""
        modules = [each for module in self._modules for each in module.modules()]
        sums = [sum(column) for column in zip(*self._inputs, strict=True)] or [0.0, 0.0, 0.0]
        of_ranks = process_group.all_gather(sums)
        parameters = parameters_in(optimizer)
        return {
            "eps": max((torch.finfo(each.dtype).eps for each in parameters), default=0.0),
            "compute_eps": self._numbers.eps if self._numbers else 0.0,
            "sums": [sum(each[place] for each in of_ranks) for place in (0, 1)],  # of inputs, and of their squares
            "calls": len(self._inputs),
            "uneven": len({each[2] for each in of_ranks}) > 1,  # ranks had different numbers of samples
            "random": bool(self._numbers and self._numbers.has_others),
            "batch_norm": any(isinstance(each, _BATCH_NORMS) for each in modules),
            "held": any(not getattr(each, "require_backward_grad_sync", True) for each in modules),
            "sharded": any(isinstance(each, DTensor) for each in parameters),
            "hyperparameters": [
                f"{name}={float(value):.12g}"
                for group in optimizer.param_groups
                for name, value in group.items()
                if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            ],
        }


def end() -> None:
    """End the script on all ranks: none leaves while another one still communicates. Collective."""
    dist.barrier()
    raise Done


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the CPU of rank 0, whole; empty on other ranks. Collective for a DTensor."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if process_group.rank():  # nobody reads it
        return torch.empty(0)
    return (tensor.to_dense() if tensor.is_sparse else tensor).cpu().clone()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with more digits, to compute norms."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def total_norm(tensors: Tensors) -> float:
    """The norm of all tensors together."""
    return math.hypot(*(float(wide(each).norm()) for each in tensors if each is not None))


def _gradients(parameters: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
    """The gradients, whole, and the means over the ranks of those that each rank has for itself. Collective."""
    gradients: Tensors = []
    means: Tensors = []
    for parameter in parameters:
        is_missing = parameter.grad is None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if isinstance(parameter, DTensor):
            is_missing = process_group.all_true(is_missing)
        means.append(None if isinstance(parameter, DTensor) else _mean(gradient))
        value = whole(gradient)
        gradients.append(None if is_missing else value)
    return gradients, means


def _mean(gradient: torch.Tensor) -> torch.Tensor:
    part = (gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()) / dist.get_world_size()
    part = part.to(comm_device(part.device)).contiguous()
    dist.all_reduce(torch.view_as_real(part) if part.is_complex() else part)
    return whole(part)


def _sums(tensor: torch.Tensor) -> list[float]:
    """The sum of the elements, that of their squares, and the size of the first dimension."""
    values = wide(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return [float(values.sum()), float(values.square().sum()), float(tensor.shape[0]) if tensor.ndim else 1.0]
