"""Checks of a model and its optimizers before they are parallelized: what a strategy cannot train is refused by name.

Torch would say so in the middle of a step, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import is_sharded
from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import sharded_units
from flk_runtime.parallel.options import ParallelOptions
from flk_runtime.parallel.rebind import replaced_name
from flk_runtime.system.torch_version import require_torch

# Optimizers that flatten or index whole parameters, which DTensor refuses in the middle of a step.
_OF_WHOLE_PARAMETERS = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def check_model(model: nn.Module, strategy: str, options: ParallelOptions, *, replicates: bool) -> None:
    """Raise SetupError for a model that ``strategy`` cannot train. ``replicates``: several ranks train one model."""
    for name, parameter in model.named_parameters():
        if replaced_name(parameter):
            raise SetupError(
                f"{name!r} was shared with a model that has been parallelized, and would no longer be: put both models "
                "into one module, and parallelize that"
            )
    found = parallelized_by_script(model)
    if found and strategy != "none":
        raise SetupError(
            f"{found}: pass the model that is not wrapped, put models that share modules into one, or use strategy none"
        )
    if found and options.precision is not None:
        raise SetupError(f"{found}, and precision= would have no effect on it: give its wrapper the dtypes")
    for name, module in model.named_modules() if replicates else ():
        # Its forward pass changes its weight. Other modules may have an attribute of this name.
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise SetupError(f"{name!r} has a max_norm, for which each rank would change other rows: leave it out")


def parallelized_by_script(model: nn.Module) -> str:
    """What torch has wrapped or sharded in ``model`` already, in words; empty if there is nothing."""
    for name, module in model.named_modules():
        if any(kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") for kind in type(module).__mro__):
            return f"{name or 'the model'} is already wrapped in {type(module).__name__}"
    shared = "by the script, or with another parallelized model, which it shares modules with"
    names = (name for name, parameter in model.named_parameters() if is_sharded(parameter))
    return next((f"{name!r} is already sharded, {shared}" for name in names), "")


def check_fsdp2(optimizers: Sequence[Optimizer], cause: str, options: ParallelOptions, device: torch.device) -> None:
    """Raise SetupError for what FSDP2 lacks in this torch, and for optimizers that need whole parameters.

    ``cause``: the strategy or the option that shards, in words.
    """
    if device.type == "cpu":
        require_torch("2.7", f"{cause} on CPUs")
    if options.find_unused_parameters:
        require_torch("2.13", f"{cause} with find_unused_parameters")
    for optimizer in optimizers:
        if isinstance(optimizer, _OF_WHOLE_PARAMETERS):
            raise SetupError(
                f"{type(optimizer).__name__} of torch cannot train parameters that {cause} shards: use another "
                "optimizer, or strategy ddp without precision="
            )


def check_shardable(model: nn.Module, blocks: Sequence[nn.Module], options: ParallelOptions, cause: str) -> None:
    """Raise SetupError for what cannot be sharded. ``cause``: the strategy or the option that shards, in words."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise SetupError(
                f"{name!r} is a scalar without rows, which {cause} cannot shard: make it a vector with one element, as "
                "torch.ones(1), or use strategy ddp without precision="
            )
        if parameter.numel() == 0 and parameter.requires_grad:
            raise SetupError(
                f"{name!r} has no elements, which {cause} cannot shard: freeze it with requires_grad_(False), or use "
                "strategy ddp without precision="
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise SetupError(
                f"{name!r} has a hook for its gradient, which {cause} would drop with the whole parameter: call "
                "register_post_accumulate_grad_hook after parallelize, or use strategy ddp without precision="
            )
    # A mapping, since a model may have thousands of units.
    units = dict.fromkeys(sharded_units(model, blocks, options.precision, ends=options.blocks is None))
    for unit in (*units, model):
        inner = {
            each for other in unit.modules() if other in units and other is not unit for each in other.parameters()
        }
        own = {each.dtype: name for name, each in unit.named_parameters() if each.requires_grad and each not in inner}
        if len(own) > 1:
            raise SetupError(
                f"a {type(unit).__name__} has {' and '.join(f'{name!r} of {dtype}' for dtype, name in own.items())}, "
                f"and {cause} shards what is trained of it in one dtype: give it one, as by .to(torch.bfloat16), name "
                "its modules of each dtype in blocks=, or use strategy ddp without precision="
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise SetupError(
                f"{name!r} has sparse gradients, which {cause} cannot reduce: make it with sparse=False, or use "
                "strategy ddp without precision="
            )
