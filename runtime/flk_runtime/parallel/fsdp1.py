"""Sharding by torch's FullyShardedDataParallel (FSDP1): the parameters of a unit are one flat tensor, cut evenly.

The user's parameters stay the objects that they were (``use_orig_params``), as views of what this rank holds of the
flat ones: of each parameter a run of its elements, or none. parallel.py imports this module when it is needed.
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

from flk_runtime.checkpoint import storage as snapshot
from flk_runtime.errors import SetupError
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.precision import Precision

_EXTRA = "_extra_state"  # torch's key for what a module's get_extra_state() returns


class FlatShard(ParallelModel):
    """A model in FullyShardedDataParallel."""

    called: FullyShardedDataParallel

    def __init__(
        self,
        model: nn.Module,
        units: Collection[nn.Module],
        mesh: DeviceMesh,
        device: torch.device,
        *,
        shards: bool,
        reshard: bool,
        precision: Precision | None,
    ) -> None:
        """``mesh`` is (shard) or (replicate, shard); ``shards``: whether a rank holds a part only. Collective."""
        self._group = mesh.get_group("shard")
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._keys = list(model.state_dict())
        self._own: dict[str, nn.Parameter] = {}
        self._shapes: dict[int, torch.Size] = {}
        parents: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    parents.setdefault(id(child), []).append((module, name))
        names: dict[int, list[str]] = {}
        for name, module in self._modules.items():
            names.setdefault(id(module), []).append(name + "." if name else "")
        options: dict[str, Any] = {
            "process_group": self._group if mesh.ndim == 1 else (self._group, mesh.get_group("replicate")),
            "sharding_strategy": _strategy(mesh, shards, reshard),
            "device_id": device,
            "use_orig_params": True,
        }
        if not shards:
            options["process_group"] = dist.group.WORLD
        if precision:
            options["mixed_precision"] = _policy(precision)
        wrapped: list[FullyShardedDataParallel] = []

        def shard(unit: nn.Module) -> None:
            for module in unit.modules():
                for prefix in names.get(id(module), ()):  # FSDP's own modules have none
                    for name, parameter in module._parameters.items():
                        if parameter is not None and prefix + name not in self._own:
                            self._own[prefix + name] = parameter
                            self._shapes[id(parameter)] = parameter.shape
            with _quiet():
                wrapped.append(FullyShardedDataParallel(unit, **options))
            for parent, name in parents.get(id(unit), ()):
                parent._modules[name] = wrapped[-1]

        Materializer(model, units, device).run(shard, broadcast=True)
        root = wrapped[-1]
        super().__init__(model, root)
        if precision:
            root.register_forward_hook(_casting(precision.output))
        self._counts = self._measure(device) if shards else None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.called.no_sync()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        norm = self.called.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: they can't be clipped")
        return norm

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._own)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key in self._keys:
            parent, _, name = key.rpartition(".")
            module = self._modules[parent]
            if key in self._own:
                state[key] = self.whole(self._own[key], self._own[key].detach())
            elif name == _EXTRA:
                state[key] = module.get_extra_state()
            else:
                state[key] = module._buffers[name]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for key in self._keys:
                parent, _, name = key.rpartition(".")
                module, value = self._modules[parent], snapshot.fetch(state[key])
                if key in self._own:
                    self._own[key].copy_(self.part(self._own[key], value))
                elif name == _EXTRA:
                    module.set_extra_state(value)
                else:
                    module.get_buffer(name).copy_(value)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return self._shapes[id(parameter)]

    def whole(self, parameter: nn.Parameter, part: Any) -> Any:
        if self._counts is None or not isinstance(part, torch.Tensor) or part.dim() != 1:
            return part
        counts = self._counts[id(parameter)]
        if part.numel() != counts[self._group.rank()]:
            raise SetupError("a snapshot can't be taken between a forward pass and its backward pass")
        padded = part.new_zeros(max(counts))
        padded[: part.numel()] = part
        all_parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(all_parts, padded, group=self._group)
        if dist.get_rank() != 0:
            return None
        cut = [each[:count].cpu() for each, count in zip(all_parts, counts, strict=True)]
        return torch.cat(cut).view(self.shape(parameter))

    def part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        if self._counts is None:
            return whole
        counts = self._counts[id(parameter)]
        begin = sum(counts[: self._group.rank()])
        return whole.flatten()[begin : begin + counts[self._group.rank()]].clone()

    def agree(self, state: dict[int, dict[str, Any]], parameters: list[nn.Parameter]) -> dict[int, dict[str, Any]]:
        # An optimizer skips a parameter of which its rank holds no element: no gradient, no state.
        if self._counts is None:
            return state
        own = {
            index: {key: value.dtype if _sharded(value) else value for key, value in values.items()}
            for index, values in state.items()
        }
        everybody: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everybody, own, group=self._group)
        merged: dict[int, dict[str, Any]] = {}
        for rank, other in enumerate(everybody):
            for index, values in other.items():
                # Where a rank holds no element, what it got from a snapshot has stood still since.
                if self._counts[id(parameters[index])][rank]:
                    merged.setdefault(index, values)
        for index, values in merged.items():
            for key, value in values.items():
                if isinstance(value, torch.dtype):
                    nothing = torch.empty(0, dtype=value, device=parameters[index].device)
                    values[key] = state.get(index, {}).get(key, nothing)
        return merged

    def _measure(self, device: torch.device) -> dict[int, list[int]]:
        """How many elements of each parameter every rank of the shard group holds."""
        unique = list({id(parameter): parameter for parameter in self._own.values()}.values())
        mine = torch.tensor([parameter.numel() for parameter in unique], device=device)
        everybody = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everybody, mine, group=self._group)
        columns = torch.stack(everybody, dim=1).tolist()
        return {id(parameter): counts for parameter, counts in zip(unique, columns, strict=True)}


def _strategy(mesh: DeviceMesh, shards: bool, reshard: bool) -> ShardingStrategy:
    if not shards:
        return ShardingStrategy.NO_SHARD
    if mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2


def _policy(precision: Precision) -> MixedPrecision:
    return MixedPrecision(
        param_dtype=precision.param,
        reduce_dtype=precision.reduce,
        buffer_dtype=precision.buffer,
        cast_forward_inputs=True,  # of every unit, as FSDP2 does
        cast_root_forward_inputs=True,
    )


def _casting(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that returns a forward pass's floating-point tensors in ``dtype``, which FSDP1 has no setting for."""

    def cast(module: nn.Module, inputs: Any, output: Any) -> Any:
        return _map(output)

    def _map(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return type(value)((key, _map(each)) for key, each in value.items())  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(_map, value))
        if isinstance(value, (list, tuple)):
            return type(value)(map(_map, value))
        return value

    return cast


def _sharded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warning that NO_SHARD, or a world of one, could do without FSDP: it was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield
