"""Activation recomputation (checkpointing): a module's forward pass runs again during its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import Blocks, find_blocks


def find_recomputed(model: nn.Module, blocks: Sequence[nn.Module], wanted: bool | Blocks) -> list[nn.Module]:
    """The modules to recompute: all ``blocks`` (True), none (False), or those that ``wanted`` selects as blocks.

    Raises SetupError if there is none, or ``wanted`` does not fit the model.
    """
    if wanted is False:
        return []
    found = list(blocks) if wanted is True else find_blocks(model, wanted, "recompute")
    if not found:
        advice = "name their class, as in blocks='Block'" if wanted is True else "name other modules"
        raise SetupError(f"recompute={wanted!r} needs blocks, and the model has none: {advice}")
    return found


def recompute_activations(module: nn.Module) -> None:
    """Drop the activations inside ``module`` after each forward pass and compute them again in the backward pass.

    The module gets a ``forward`` of its own; its class, the names of its parameters and its hooks stay, and it can be
    copied and pickled. `nn.Module.compile` may follow. The method is by Chen et al., "Training Deep Nets with Sublinear
    Memory Cost" (arXiv 1604.06174), as implemented by torch.utils.checkpoint without reentrant autograd.

    Raises SetupError if the module already has a ``forward`` that is not its class's.
    """
    if "forward" in vars(module):
        raise SetupError(
            f"recompute=True: a {type(module).__name__} has a forward attribute of its own in place of its class's; "
            "remove the attribute, or recompute other blocks"
        )
    module.forward = functools.partial(_forward, module)


# A function of its own, which pickle finds by name, and around torch's checkpoint, so that the compiler traces it.
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(type(module).forward, module, *args, use_reentrant=False, **kwargs)
