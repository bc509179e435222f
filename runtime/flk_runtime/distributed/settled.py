"""Settled parameters: a strategy trains them."""

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
    """Note that a strategy trains ``parameters``."""
    for each in parameters:
        setattr(each, _MARK, True)


def is_settled(parameter: torch.Tensor) -> bool:
    """Whether a strategy trains ``parameter``."""
    return hasattr(parameter, _MARK)
