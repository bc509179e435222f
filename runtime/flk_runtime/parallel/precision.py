"""Precision: the dtypes of mixed-precision training under FSDP."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.system import pytree


@dataclass(frozen=True)
class Precision:
    """The dtypes of mixed-precision training. Master weights and optimizer state stay in the model's own dtype.

    Every dtype is explicit, because what torch takes for None differs between its versions. ``float32``: classes of
    modules, or their names, that compute in float32 from inputs cast to it, and whose outputs are cast to ``param``;
    derived classes too. Batch norms do by default, since they keep their statistics in float32.
    Raises SetupError for anything but a floating-point dtype, or but classes and names.
    """

    param: torch.dtype = torch.bfloat16  # of parameters, inputs and activations in forward and backward passes
    reduce: torch.dtype = torch.float32  # in which gradients are summed over the ranks
    buffer: torch.dtype = torch.float32  # of floating-point buffers
    output: torch.dtype = torch.float32  # of the model's floating-point outputs; bfloat16 has too few digits for a loss

    float32: tuple[type[nn.Module] | str, ...] = ("_BatchNorm",)  # the base class of torch's batch norms

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "float32":
                if not isinstance(value, tuple) or not all(isinstance(kind, (str, type)) for kind in value):
                    raise SetupError(f"Precision(float32={value!r}): expected a tuple of classes of modules, or names")
            elif not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise SetupError(f"Precision({field.name}={value!r}): expected a floating-point dtype of torch")

    def computes_in_float32(self, module: nn.Module) -> bool:
        """Whether ``module`` is of one of the classes that do."""
        return any(wanted in (kind, kind.__name__) for wanted in self.float32 for kind in type(module).__mro__)

    def param_dtype(self, module: nn.Module) -> torch.dtype:
        """The dtype of the parameters and the inputs of a module that is sharded by itself."""
        return torch.float32 if self.computes_in_float32(module) else self.param

    def output_dtype(self, module: nn.Module, *, root: bool) -> torch.dtype | None:
        """The dtype of the outputs of such a module, the whole model if ``root``; None: they stay as they are."""
        if root:
            return self.output
        return self.param if self.computes_in_float32(module) else None


def cast_buffers(block: nn.Module, precision: Precision) -> None:
    """Give the floating-point buffers in ``block`` their dtype."""
    for module in block.modules():
        dtype = torch.float32 if precision.computes_in_float32(module) else precision.buffer
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def cast_without_parameters(model: nn.Module, precision: Precision) -> None:
    """Have modules without parameters compute in float32 if they are to: fully_shard casts for those with some."""
    for module in model.modules():
        if precision.computes_in_float32(module) and next(module.parameters(), None) is None:
            _cast_calls(module, precision)


def _cast_calls(module: nn.Module, precision: Precision) -> None:
    """Have ``module`` compute in float32, as fully_shard does for one with parameters."""

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        return pytree.map_leaves(
            tree, lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        )

    module.register_forward_pre_hook(lambda module, args, kwargs: cast((args, kwargs), torch.float32), with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: cast(output, precision.param))
