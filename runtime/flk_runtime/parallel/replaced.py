"""Replaced parameters: an optimizer that still holds some would train nothing, so its step is refused.

Sharding, and memory for a model on the meta device, give a model new parameters. Nothing computes a gradient of the old
ones, and an optimizer skips a parameter without a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flk_runtime.errors import SetupError

_MARK = "_flk_replaced"  # attribute of a replaced parameter: its name in the model


def mark(parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Have the steps of all optimizers that hold one of ``parameters``, by names in their model, be refused."""
    for name, parameter in parameters.items():
        if parameter is not None:
            setattr(parameter, _MARK, name)
            _watch_steps()


@functools.cache
def _watch_steps() -> None:
    """Have the steps of all optimizers be checked. A second call does nothing."""
    register_optimizer_step_pre_hook(lambda optimizer, *_: refuse(optimizer))


def name_of(tensor: torch.Tensor) -> str | None:
    """The name of a parameter that was replaced; None of any other tensor."""
    name: str | None = getattr(tensor, _MARK, None)
    return name


def refuse(optimizer: Optimizer) -> None:
    """Raise SetupError if ``optimizer`` holds parameters that were replaced."""
    names = [name for group in optimizer.param_groups for each in group["params"] if (name := name_of(each))]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise SetupError(
            f"{type(optimizer).__name__} holds the parameter {names[0]!r}{others} that parallelize has replaced, so it "
            "would train nothing: pass all optimizers, as in run.parallelize(model, [first, second]), or make them "
            "after parallelize"
        )
