"""Strategies: how the ranks share the work on one model. Each is one entry of the table STRATEGIES."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flk_runtime import contract
from flk_runtime.errors import SetupError

Wrap = Callable[[nn.Module, torch.device], nn.Module]


def choose(strategy: str | None) -> str:
    """The strategy's name: the argument, else $FLK_STRATEGY, else ddp."""
    name = strategy or os.environ.get(contract.STRATEGY) or "ddp"
    if name not in STRATEGIES:
        where = "" if strategy else f" (from {contract.STRATEGY})"
        raise SetupError(f"unknown strategy {name!r}{where}: expected one of {', '.join(STRATEGIES)}")
    return name


def wrap(model: nn.Module, strategy: str, device: torch.device, world_size: int) -> nn.Module:
    """``model``, which is on ``device``, in the form that trains with all ranks. A world of one needs none."""
    return STRATEGIES[strategy](model, device) if world_size > 1 else model


def _none(model: nn.Module, device: torch.device) -> nn.Module:
    """The user communicates on her own."""
    return model


def _ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """Every rank holds the whole model, starts with rank 0's parameters, and gradients are averaged."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SetupError("the model has no parameter that requires a gradient: strategy ddp has nothing to average")
    wrapped = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    _fix_layout(wrapped, device)
    return wrapped


def _fix_layout(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """Let DDP lay out its buckets for good, by a pass through a stand-in for the model.

    It lays them out anew after its first backward pass. So a resumed run would add up the gradients of its first step
    in another order than the run that was never interrupted, and from three ranks on the sums would differ in their
    last bit.
    """
    model = wrapped.module
    if any(getattr(module, "sparse", False) for module in model.modules()):
        return  # an embedding with sparse gradients: DDP would not take dense ones for it
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped.module = _StandIn(parameters)
    try:
        with torch.enable_grad():
            wrapped(torch.zeros((), device=device)).backward()
    finally:
        wrapped.module = model
    for parameter in parameters:
        parameter.grad = None


class _StandIn(nn.Module):
    """A model whose gradients are 0, and ready in the reverse order of its parameters: as a real one's are, roughly."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._touched = parameters

    def forward(self, zero: torch.Tensor) -> torch.Tensor:
        total = zero
        for parameter in self._touched:
            total = total + parameter.sum() * 0
        return total


STRATEGIES: dict[str, Wrap] = {"none": _none, "ddp": _ddp}
