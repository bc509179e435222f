"""Every rank holds the whole model, and gradients are averaged: torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel


class Replicated(ParallelModel):
    """A model in DistributedDataParallel."""

    called: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device, *, find_unused_parameters: bool) -> None:
        """``model`` is on ``device``; rank 0's parameters and buffers go to all. Collective."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SetupError("the model has no parameter that requires a gradient: strategy ddp has nothing to average")
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        _fix_layout(wrapped, device)
        super().__init__(model, wrapped)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.called.no_sync()


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
    wrapped.module = _StandIn(parameters, list(model.buffers()))
    try:
        with torch.enable_grad():
            wrapped(torch.zeros((), device=device)).backward()
    finally:
        wrapped.module = model
    for parameter in parameters:
        parameter.grad = None


class _StandIn(nn.Module):
    """A model whose gradients are 0, and ready in the reverse order of its parameters: as a real one's are, roughly."""

    def __init__(self, parameters: list[nn.Parameter], buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self._touched = parameters
        for number, buffer in enumerate(buffers):  # DDP sends rank 0's before a forward pass, and asserts some
            self.register_buffer(str(number), buffer)

    def forward(self, zero: torch.Tensor) -> torch.Tensor:
        total = zero
        for parameter in self._touched:
            total = total + parameter.sum() * 0
        return total
