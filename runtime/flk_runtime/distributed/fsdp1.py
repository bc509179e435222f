"""Whether a script has wrapped a module in FSDP1 itself. flk's strategies use FSDP2."""

from __future__ import annotations

import sys

from torch import nn


def has_fsdp1(module: nn.Module) -> bool:
    """Whether ``module`` or a submodule is wrapped in FSDP1, whose parameters are shards and do not say so."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and imported already if there is one
    return fsdp is not None and any(isinstance(child, fsdp.FullyShardedDataParallel) for child in module.modules())
