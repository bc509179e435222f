"""Settled parameters: it is known how the ranks train them, so that an optimizer's step with them is no mistake.

Gradients of a parameter are averaged by a strategy or by a `DistributedOptimizer`, or the script has said that they
need not be.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

_MARK = "_flk_settled"  # attribute of a parameter


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Note that it is known how the ranks train ``parameters``."""
    for each in parameters:
        setattr(each, _MARK, True)


def is_settled(parameter: torch.Tensor) -> bool:
    """Whether it is known how the ranks train ``parameter``."""
    return hasattr(parameter, _MARK)
