"""Precision: the dtypes of mixed-precision training under FSDP."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flk_runtime.errors import SetupError


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed-precision training. Master weights and optimizer state stay in the model's own dtype.

    Every dtype is explicit, because what torch takes for None differs between its versions.
    Raises SetupError for anything but a floating-point dtype.
    """

    param: torch.dtype = torch.bfloat16  # of parameters, inputs and activations in forward and backward passes
    reduce: torch.dtype = torch.float32  # in which gradients are summed over the ranks
    buffer: torch.dtype = torch.float32  # of floating-point buffers
    output: torch.dtype = torch.float32  # of the model's floating-point outputs; bfloat16 has too few digits for a loss

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise SetupError(f"Precision({field.name}={value!r}): expected a floating-point dtype of torch")
