"""Mixed precision: which numbers a sharded model computes, adds up and keeps in."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flk_runtime.errors import SetupError


@dataclass(frozen=True)
class Precision:
    """The dtypes of a mixed-precision training. The master weights and the optimizer stay in the model's own dtype.

    Every dtype is written out, never left to torch: what torch takes for None differs between its versions and its two
    implementations of sharding.
    """

    param: torch.dtype = torch.bfloat16  # what forward and backward compute with: parameters, inputs, activations
    reduce: torch.dtype = torch.float32  # what gradients are added up in over the ranks
    buffer: torch.dtype = torch.float32  # what floating-point buffers are kept in
    output: torch.dtype = torch.float32  # what the model returns: losses want more digits than bfloat16 has

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise SetupError(f"Precision({each.name}={value!r}): expected a floating-point dtype of torch")
