"""ParallelModel: the interface between a run and a parallelized model; DDP and FSDP are subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import module_state, names_by_id, parameters_of
from flk_runtime.distributed.process_group import full


class ParallelModel:
    """A model that is not wrapped: every rank holds all of it, and nothing is communicated.

    A world of one rank and strategy ``none`` train with this class itself.
    """

    def __init__(self, model: nn.Module, module: nn.Module | None = None) -> None:
        self.model = model  # the user's
        self.module = module or model  # the user calls it in the model's place: the wrapper, if there is one
        self.state = module_state(self.module)  # of the model, in checkpoints
        self.replicas: dist.ProcessGroup | None = None
        """The ranks that hold the same parameters, or shards of them, as this one; None if there are no others."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without communication."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``. Collective.

        Returns the norm before, a tensor of shape () that is the same on all ranks. Raises RuntimeError if
        ``error_if_nonfinite`` and the norm is NaN or infinite.
        """
        return full(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type, error_if_nonfinite))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer takes, by the names of the user's model. A tied parameter has several."""
        return parameters_of(self.module)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by the names of the user's model. A tied one has its first name."""
        names = names_by_id(self.module)
        return {
            name: parameter
            for name, parameter in self.parameters().items()
            if parameter.requires_grad and names[id(parameter)] == name
        }

    def loose_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that nothing sends from rank 0 to all ranks, and that they have to hold alike; by their names."""
        return {}

    def tie_buffers(self, names: Iterable[str]) -> None:
        """Have rank 0 send these buffers of `loose_buffers` to all ranks from now on, as DDP does its buffers."""

    def attach(self, optimizer: Optimizer) -> None:
        """Called once ``optimizer``, which was handed over, holds the parameters of `parameters`."""

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor:
        """The full parameter, on all ranks. Collective."""
        return full(parameter.detach())

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of ``full``, a tensor of the shape of the full parameter that every rank has."""
        return full
