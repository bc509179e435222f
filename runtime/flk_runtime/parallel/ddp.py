"""Strategy ddp: every rank holds the whole model, in torch's DistributedDataParallel, which averages gradients."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel


class DDPModel(ParallelModel):
    """A model in DistributedDataParallel."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device, *, find_unused_parameters: bool) -> None:
        """Wrap ``model``, which is on ``device``; rank 0's parameters and buffers are sent to all ranks. Collective.

        Raises SetupError if no parameter requires a gradient.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise SetupError(
                "no parameter of the model requires a gradient, so strategy ddp has nothing to average: use strategy "
                "none, or parallelize only models that are trained"
            )
        module = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
        _finalize_buckets(module, device)
        super().__init__(model, module)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()


def _finalize_buckets(module: DistributedDataParallel, device: torch.device) -> None:
    """Make DDP assign gradients to buckets for good, by a forward and backward pass of a substitute for the model.

    DDP assigns them again after its first backward pass. The first step of a resumed run would therefore sum gradients
    in another order than the same step of a run that was not interrupted, and from three ranks on the results would
    differ in the last bit.
    """
    model = module.module
    if any(getattr(child, "sparse", False) for child in model.modules()):
        return  # an embedding with sparse gradients: DDP would not accept the substitute's dense ones
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    module.module = _ZeroGradients(parameters, list(model.buffers()))
    try:
        with torch.enable_grad():
            module(torch.zeros((), device=device)).backward()
    finally:
        module.module = model
    for parameter in parameters:
        parameter.grad = None


class _ZeroGradients(nn.Module):
    """A substitute model whose gradients are 0 and are ready in the reverse order of its parameters."""

    def __init__(self, parameters: list[nn.Parameter], buffers: list[torch.Tensor]) -> None:
        super().__init__()
        self._trained = parameters
        for number, buffer in enumerate(buffers):  # DDP broadcasts buffers before a forward pass and asserts some
            self.register_buffer(str(number), buffer)

    def forward(self, zero: torch.Tensor) -> torch.Tensor:
        """Return ``zero``, of shape (), plus 0 times the sum of each parameter; a complex sum counts by its parts."""
        total = zero
        for parameter in self._trained:
            values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            total = total + values.sum() * 0
        return total
