"""Agreement: whether ranks train one model: replicas have equal parameters, and optimizers equal hyperparameters.

A script may make ranks train apart without an error: a learning rate that follows the loss of each rank, noise that
each rank draws for itself, gradients of torch.autograd.grad. Replicas then differ, and shards have steps of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Set
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from flk_runtime.checkpoint import is_sharded, local
from flk_runtime.distributed import differing, find_difference, first_far, parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelModel
from flk_runtime.system.bits import is_compared

_ADVICE: Final = (
    "give all ranks the same values, such as run.mean(loss) for a scheduler or a closure, change parameters alike on "
    "all ranks, call the model that parallelize returned and no method of it, or use strategy none"
)


class Agreement:
    """Compares what ranks have to hold alike: after 8 steps each, then after 16, 32, 64, …, and every 512 steps."""

    def __init__(self) -> None:
        self._steps = 0  # since the start of this attempt
        self._next = 1  # the step after which they are compared

    def step(self) -> bool:
        """Count a step. Returns whether the ranks have to compare after it."""
        self._steps += 1
        return self._steps >= self._next

    def compare(self, models: Iterable[ParallelModel], optimizers: Collection[Optimizer]) -> None:
        """Compare all ranks. Collective. Raises SetupError on all ranks where they differ."""
        self._next = next(step for step in itertools.count(self._steps + 1) if is_compared(step))
        models = list(models)
        own = {id(parameter) for model in models for parameter in model.parameters().values()}
        others = _beside(own, optimizers)
        lines = [(name, f"{tensor.dtype} {tuple(tensor.shape)}") for name, tensor in others.items()]
        if found := find_difference("the end of a step", _described(own, optimizers) + lines):
            raise SetupError(f"the ranks train apart: {found}: {_ADVICE}")
        if name := first_far(others, dist.group.WORLD):
            raise SetupError(
                f"the ranks train apart: {name}, in no model of parallelize, has other values on other ranks: "
                "pass its module to parallelize, average its gradient before the step, or register "
                "flk.per_rank(optimizer) if each rank shall train its own"
            )
        for model in models:
            _compare_parameters(model)
            buffers = {name: local(buffer) for name, buffer in model.loose_buffers().items()}
            if names := differing(buffers, dist.group.WORLD):
                model.tie_buffers(names)


def _described(own: Set[int], optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
    """The hyperparameters of the optimizers that train the models, each with its path and its value.

    ``own`` are the IDs of the parameters of the models.
    """
    trained = [optimizer for optimizer in optimizers if not own.isdisjoint(map(id, parameters_in(optimizer)))]
    return [
        (f"{key} in group {number} of {type(optimizer).__name__} {place}", _text(value))
        for place, optimizer in enumerate(trained)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    ]


def _beside(own: Set[int], optimizers: Iterable[Optimizer]) -> dict[str, torch.Tensor]:
    """The parameters that each rank holds whole and that optimizers train beside the models, such as a temperature.

    ``own`` are the IDs of the parameters of the models.
    """
    return {
        f"parameter {number} of {type(optimizer).__name__} {place}, "
        f"of shape {tuple(parameter.shape)}": parameter.detach()
        for place, optimizer in enumerate(optimizers)
        for number, parameter in enumerate(parameters_in(optimizer))
        if parameter.requires_grad and id(parameter) not in own and not is_sharded(parameter)
    }


def _text(value: Any) -> str:
    """A hyperparameter as text; of values that are no numbers, texts, or tuples and lists of these only the type."""
    if isinstance(value, torch.Tensor):
        return repr(value.detach().double().tolist()) if value.numel() == 1 else f"a tensor {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return repr([_text(item) for item in value])
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _compare_parameters(model: ParallelModel) -> None:
    """Raise SetupError on all ranks if replicas of a model have other parameters. Collective."""
    group, trained = model.replicas, model.trained()
    if group is not None and (name := first_far({key: local(each) for key, each in trained.items()}, group)):
        unused = [
            each
            for each, parameter in trained.items()
            if parameter.grad is None and not getattr(model.module, "find_unused_parameters", True)
        ]
        # DDP averages none of the gradients that share a bucket with one that is missing.
        advice = (
            f"{unused[0]!r} has no gradient on this rank: pass find_unused_parameters=True to parallelize if a step "
            "does not use all parameters, or freeze those that no step uses"
            if 0 < len(unused) < len(trained)
            else _ADVICE
        )
        raise SetupError(f"the ranks train apart: {name!r} has other values on other ranks: {advice}")
