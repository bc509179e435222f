"""Precision: the dtypes of mixed-precision training under FSDP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed-precision training. Master weights, buffers and optimizer state stay in the model's own.

    Every dtype is explicit, because what torch takes for None differs between its versions. Batch norms, which keep
    statistics, compute in float32.
    """

    param: torch.dtype = torch.bfloat16  # of parameters, inputs and activations in forward and backward passes
    reduce: torch.dtype = torch.float32  # in which gradients are summed over the ranks
    output: torch.dtype = torch.float32  # of the model's floating-point outputs; bfloat16 has too few digits for a loss

    def computes_in_float32(self, module: nn.Module) -> bool:
        """Whether ``module`` is a batch norm with parameters: one without gets along with any input."""
        return is_batch_norm(module) and next(module.parameters(), None) is not None

    def param_dtype(self, module: nn.Module) -> torch.dtype:
        """The dtype of the parameters and the inputs of a module that is sharded by itself."""
        return torch.float32 if self.computes_in_float32(module) else self.param

    def output_dtype(self, module: nn.Module, *, root: bool) -> torch.dtype | None:
        """The dtype of the outputs of such a module, the whole model if ``root``; None: they stay as they are."""
        if root:
            return self.output
        return self.param if self.computes_in_float32(module) else None


def is_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's batch norms, or of a class derived from them."""
    return any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__)
