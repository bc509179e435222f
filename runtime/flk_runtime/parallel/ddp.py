"""Strategy ddp: every rank holds the whole model, in torch's DistributedDataParallel, which averages gradients."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flk_runtime.distributed import synchronize
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.system.torch_private import assign_buckets


class DDPModel(ParallelModel):
    """A model in DistributedDataParallel."""

    module: DistributedDataParallel

    def __init__(self, model: nn.Module, device: torch.device, *, find_unused_parameters: bool) -> None:
        """Wrap ``model``, which is on ``device``; rank 0's parameters and buffers are sent to all ranks. Collective."""
        module = _Wrapper(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            # Else a gradient that a script drops and keeps would be overwritten by the next backward pass.
            gradient_as_bucket_view=False,
            find_unused_parameters=find_unused_parameters,
        )
        module.own_names = frozenset({*vars(module), "module"})
        super().__init__(model, module)
        self.replicas = dist.group.WORLD
        if not find_unused_parameters:  # else DDP keeps the buckets that it begins with
            assign_buckets(module)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()


class FrozenModel(ParallelModel):
    """A model that is not trained, such as a reference model: DDP does not wrap it, since it averages nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Send rank 0's parameters and buffers to all ranks. Collective."""
        super().__init__(model)
        self.replicas = dist.group.WORLD
        synchronize(model)


class _Wrapper(DistributedDataParallel):
    """Has the attributes of the model, such as a method ``generate``, as a model under another strategy has them.

    What a script sets is the model's too, such as a temperature, but for what DDP has set itself.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("own_names", (name,)) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)
