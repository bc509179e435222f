"""Replaced parameters: whoever still holds one would train nothing, or use old values, so that is an error.

Sharding, and memory for a model on the meta device, give a model new parameters. Nothing computes a gradient of the old
ones, and an optimizer skips a parameter without a gradient.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flk_runtime.distributed import parameters_in
from flk_runtime.errors import SetupError
from flk_runtime.system import pytree

_MARK = "_flk_replaced"  # attribute of a replaced parameter: its name in the model
# The attributes of a parameter, in contrast to its values and its gradient.
_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "itemsize",
    "nbytes",
)
_FLAGS = ("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested")
_METHODS = ("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex")
_OPERATORS = ("__len__", "__hash__", "__repr__", "is_contiguous", "get_device", "ndimension")
_HARMLESS = {getattr(torch.Tensor, name).__get__ for name in (*_PROPERTIES, *_FLAGS)}
_HARMLESS |= {getattr(torch.Tensor, name) for name in (*_METHODS, *_OPERATORS)}


def mark(parameters: Mapping[str, torch.Tensor | None]) -> None:
    """Have each use of ``parameters``, by names in their model, and steps of optimizers that hold one be refused."""
    for name, parameter in parameters.items():
        if parameter is not None and not name_of(parameter):
            setattr(parameter, _MARK, name)
            parameter.__class__ = _unusable(type(parameter))
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
    # The class is faster to look at than the mark; this is done at each step.
    found = [each for each in parameters_in(optimizer) if isinstance(each, _Unusable)]
    names = [getattr(each, _MARK) for each in found]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise SetupError(
            f"{type(optimizer).__name__} holds the parameter {names[0]!r}{others} that parallelize has replaced, so it "
            "would train nothing: pass all optimizers, as in run.parallelize(model, [first, second]), or make them "
            "after parallelize"
        )


class _Unusable:
    """A tensor of which operations are errors: in its place an optimizer without torch's class would train nothing."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((name for each in pytree.leaves((args, kwargs)) if (name := name_of(each))), "")
        raise SetupError(
            f"the script uses the parameter {name!r}, which parallelize has replaced, so this would train nothing: "
            "make what holds it, such as an optimizer, after parallelize, of the parameters of the returned module"
        )


@functools.cache
def _unusable(kind: type) -> type:
    """A subclass of a class of parameters, with its name, whose operations are errors."""
    return types.new_class(kind.__name__, (_Unusable, kind))
