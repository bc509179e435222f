"""FSDP1: torch's FullyShardedDataParallel, which flattens the parameters of a block into one tensor and splits it.

With ``use_orig_params`` the user's parameters stay the same objects and become views of this rank's part of the flat
tensor: of each parameter a contiguous run of its elements, as a tensor of shape (n,), where n may be 0.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from flk_runtime.checkpoint import fetch
from flk_runtime.errors import SetupError
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.precision import Precision
from flk_runtime.system.pytree import map_leaves

_EXTRA = "_extra_state"  # torch's key for what a module's get_extra_state() returns


class FSDP1Model(ParallelModel):
    """A model in FullyShardedDataParallel."""

    module: FullyShardedDataParallel

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        shards: bool,
        reshard: bool,
        precision: Precision | None,
    ) -> None:
        """Shard ``model`` in place, each of ``blocks`` on its own. Collective.

        ``mesh`` has the dimension shard, or replicate and shard. ``shards``: each rank holds a shard, not everything.
        ``reshard``: free a block's full parameters after its forward pass.
        """
        self._group = mesh.get_group("shard")
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._keys = list(model.state_dict())
        self._parameters: dict[str, nn.Parameter] = {}  # by the names of the user's model
        self._shapes: dict[int, torch.Size] = {}  # of full parameters, by the parameter's id
        parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    parents.setdefault(id(child), []).append((module, name))
        prefixes: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            prefixes.setdefault(id(module), []).append(name + "." if name else "")
        options: dict[str, Any] = {
            "process_group": self._group if mesh.ndim == 1 else (self._group, mesh.get_group("replicate")),
            "sharding_strategy": _sharding_strategy(mesh, shards, reshard),
            "device_id": device,
            "use_orig_params": True,
        }
        if not shards:
            options["process_group"] = dist.group.WORLD
        if precision:
            options["mixed_precision"] = _mixed_precision(precision)
        wrappers: list[FullyShardedDataParallel] = []

        def shard(block: nn.Module) -> None:
            for module in block.modules():
                for prefix in prefixes.get(id(module), ()):  # FSDP's own modules have none
                    for name, parameter in module._parameters.items():
                        if parameter is not None and prefix + name not in self._parameters:
                            self._parameters[prefix + name] = parameter
                            self._shapes[id(parameter)] = parameter.shape
            with _no_shard_warning_ignored():
                wrappers.append(FullyShardedDataParallel(block, **options))
            for parent, name in parents.get(id(block), ()):
                parent._modules[name] = wrappers[-1]

        Materializer(model, blocks, device).run(shard, broadcast=True)
        root = wrappers[-1]
        super().__init__(model, root)
        if precision:
            root.register_forward_hook(_cast_output(precision.output))
        self._numels = self._gather_numels(device) if shards else None  # by the parameter's id: elements on each rank

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        norm = self.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"cannot clip gradients: their norm is {norm.item()}")
        return norm

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key in self._keys:
            parent, _, name = key.rpartition(".")
            module = self._modules[parent]
            if key in self._parameters:
                state[key] = self.full_tensor(self._parameters[key], self._parameters[key].detach())
            elif name == _EXTRA:
                state[key] = module.get_extra_state()
            else:
                state[key] = module._buffers[name]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for key in self._keys:
                parent, _, name = key.rpartition(".")
                module, value = self._modules[parent], fetch(state[key])
                if key in self._parameters:
                    self._parameters[key].copy_(self.local_shard(self._parameters[key], value))
                elif name == _EXTRA:
                    module.set_extra_state(value)
                else:
                    module.get_buffer(name).copy_(value)

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return self._shapes[id(parameter)]

    def full_tensor(self, parameter: nn.Parameter, local: Any) -> Any:
        if self._numels is None or not _is_sharded(local):
            return local
        numels = self._numels[id(parameter)]
        if local.numel() != numels[self._group.rank()]:
            raise SetupError(
                "cannot save a checkpoint between a forward pass and its backward pass: save after optimizer.step()"
            )
        padded = local.new_zeros(max(numels))
        padded[: local.numel()] = local
        gathered = [torch.empty_like(padded) for _ in numels]
        dist.all_gather(gathered, padded, group=self._group)
        if dist.get_rank() != 0:
            return None
        shards = [each[:numel].cpu() for each, numel in zip(gathered, numels, strict=True)]
        return torch.cat(shards).view(self.full_shape(parameter))

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        if self._numels is None:
            return full
        numels = self._numels[id(parameter)]
        begin = sum(numels[: self._group.rank()])
        return full.flatten()[begin : begin + numels[self._group.rank()]].clone()

    def complete_optimizer_state(
        self, state: dict[int, dict[str, Any]], parameters: list[nn.Parameter]
    ) -> dict[int, dict[str, Any]]:
        # A parameter of which this rank holds no element has no gradient here, so the optimizer makes no state for it.
        if self._numels is None:
            return state
        own = {
            index: {key: value.dtype if _is_sharded(value) else value for key, value in values.items()}
            for index, values in state.items()
        }
        states: list[Any] = [None] * self._group.size()
        dist.all_gather_object(states, own, group=self._group)
        merged: dict[int, dict[str, Any]] = {}
        for rank, other in enumerate(states):
            for index, values in other.items():
                # A rank without elements may have values from a checkpoint, which do not change: they are outdated.
                if self._numels[id(parameters[index])][rank]:
                    merged.setdefault(index, values)
        for index, values in merged.items():
            for key, value in values.items():
                if isinstance(value, torch.dtype):
                    nothing = torch.empty(0, dtype=value, device=parameters[index].device)
                    values[key] = state.get(index, {}).get(key, nothing)
        return merged

    def _gather_numels(self, device: torch.device) -> dict[int, list[int]]:
        """The number of elements of each parameter on every rank of the shard group, by the parameter's id."""
        unique = list({id(parameter): parameter for parameter in self._parameters.values()}.values())
        own = torch.tensor([parameter.numel() for parameter in unique], device=device)
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(gathered, own, group=self._group)
        rows = torch.stack(gathered, dim=1).tolist()
        return {id(parameter): numels for parameter, numels in zip(unique, rows, strict=True)}


def _sharding_strategy(mesh: DeviceMesh, shards: bool, reshard: bool) -> ShardingStrategy:
    if not shards:
        return ShardingStrategy.NO_SHARD
    if mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2


def _mixed_precision(precision: Precision) -> MixedPrecision:
    return MixedPrecision(
        param_dtype=precision.param,
        reduce_dtype=precision.reduce,
        buffer_dtype=precision.buffer,
        cast_forward_inputs=True,  # of every block, as FSDP2 does
        cast_root_forward_inputs=True,
    )


def _cast_output(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward hook that casts the floating-point tensors of the output to ``dtype``; FSDP1 has no option for it."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return lambda module, inputs, output: map_leaves(output, cast)


def _is_sharded(value: Any) -> bool:
    """Whether a value of the optimizer's state is a shard: of shape (n,), as the parameters are."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


@contextlib.contextmanager
def _no_shard_warning_ignored() -> Iterator[None]:
    """Ignore torch's warning that NO_SHARD, or a world of one, does not need FSDP: the user asked for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield
