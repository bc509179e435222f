"""check_shardable(): models that fully_shard cannot train are refused, by the name of a parameter or a module.

Torch would say so in the middle of a step, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from flk_runtime.errors import SetupError


def check_shardable(model: nn.Module, units: Iterable[nn.Module], cause: str) -> None:
    """Raise SetupError for what cannot be sharded. ``cause``: the strategy or the option that shards, in words.

    ``units``: the modules in ``model`` that are sharded one by one.
    """
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise SetupError(
                f"{name!r} has hooks, which {cause} would lose: register them after parallelize, with "
                "register_post_accumulate_grad_hook"
            )
        if parameter.dim() == 0:
            raise SetupError(f"{name!r} is a scalar, which {cause} cannot shard: give it the shape (1,)")
        if parameter.numel() == 0 and parameter.requires_grad:
            raise SetupError(
                f"{name!r} has no elements, which {cause} cannot shard: freeze it with requires_grad_(False), or use "
                "strategy ddp without precision="
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise SetupError(
                f"{name!r} has sparse gradients, which {cause} cannot reduce: make it with sparse=False, or use "
                "strategy ddp without precision="
            )
    _check_dtypes(model, units, cause)


def _check_dtypes(model: nn.Module, units: Iterable[nn.Module], cause: str) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in [*sorted(units, key=lambda unit: sum(1 for _ in unit.modules())), model]:  # inner ones first
        first: dict[torch.dtype, str] = {}
        for parameter in unit.parameters():
            name = names.pop(id(parameter), "")  # none: it is in a unit of its own
            if name and parameter.requires_grad:
                first.setdefault(parameter.dtype, name)
        if len(first) > 1:
            both = " and ".join(f"{name!r} {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
            raise SetupError(
                f"parameters that {cause} gathers together have several dtypes ({both}): make the modules that have "
                "another dtype blocks of their own, as in parallelize(…, blocks=['layers.*', 'name']), or use strategy "
                "ddp without precision="
            )
