"""Sharding by torch's fully_shard (FSDP2): each parameter is a DTensor, of which a rank holds some rows.

Needs torch 2.6, and takes a moment to import: parallel.py imports this module when it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from flk_runtime.checkpoint import storage as snapshot
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.precision import Precision

CAN_FIND_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class FullyShard(ParallelModel):
    """A model whose units have been sharded in place: it is called as before."""

    def __init__(
        self,
        model: nn.Module,
        units: Collection[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        reshard: bool,
        precision: Precision | None,
        find_unused_parameters: bool,
    ) -> None:
        """``mesh`` is (shard) or (replicate, shard); ``reshard``: free a block's parameters after its forward pass.

        The model's own parameters, those outside of blocks, are the first that the backward pass needs, so they are
        kept for it. Collective.
        """

        def shard(unit: nn.Module) -> None:
            root = unit is model
            if precision:
                _cast_buffers(unit, precision.buffer)
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=reshard and not root,
                mp_policy=_policy(precision, root) if precision else MixedPrecisionPolicy(),
            )

        Materializer(model, units, device).run(shard, broadcast=True)
        super().__init__(model)
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._keeps = not reshard
        if find_unused_parameters:
            for module in self._modules:
                module.set_reduce_scatter_unused_params(True, recurse=False)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._communicate(False)
        try:
            yield
        finally:
            self._communicate(True)

    def _communicate(self, yes: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(yes, recurse=False)
            if self._keeps:  # one gathering serves all the passes
                module.set_reshard_after_backward(yes, recurse=False)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        norm = super().clip(max_norm, norm_type, error_if_nonfinite)
        return _full(norm)

    def attach(self, optimizer: Optimizer) -> None:
        if self._keeps:
            # A forward pass since the last backward pass (an evaluation) has left whole parameters, which the step
            # would not change.
            optimizer.register_step_pre_hook(lambda *_: self.reshard())

    def reshard(self) -> None:
        """Give up whole parameters that a forward pass without a backward pass has left."""
        for module in self._modules:
            module.reshard()

    def parameters(self) -> dict[str, nn.Parameter]:
        self.reshard()
        return super().parameters()

    def state_dict(self) -> dict[str, Any]:
        self.reshard()
        return {name: _whole(value) for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reshard()
        own = self.model.state_dict()
        parts = {}
        for name, value in state.items():
            value = snapshot.fetch(value)
            parts[name] = _part(own[name], value) if isinstance(own.get(name), DTensor) else value
        self.model.load_state_dict(parts)

    def whole(self, parameter: nn.Parameter, part: Any) -> Any:
        return _whole(part)

    def part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return _part(parameter, whole)


def _policy(precision: Precision, root: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=precision.param,
        reduce_dtype=precision.reduce,
        output_dtype=precision.output if root else precision.param,
        cast_forward_inputs=True,
    )


def _cast_buffers(unit: nn.Module, dtype: torch.dtype) -> None:
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def _whole(value: Any) -> Any:
    """One tensor at a time: where it is not kept it is gone again before the next one is gathered."""
    if not isinstance(value, DTensor):
        return value
    full = _full(value.detach())
    return full.cpu() if torch.distributed.get_rank() == 0 else None


def _full(value: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return full


def _part(like: Any, whole: torch.Tensor) -> torch.Tensor:
    """``whole``, which every rank has, sharded as ``like`` is, without communication."""
    whole = whole.to(device=like.device)
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    part: torch.Tensor = replicated.redistribute(placements=like.placements)
    return part.clone()  # no view that would keep the whole alive
