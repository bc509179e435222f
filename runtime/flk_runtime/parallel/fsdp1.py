"""FSDP1: torch's FullyShardedDataParallel, which flattens the parameters of a block into one tensor and splits it.

With ``use_orig_params`` the user's parameters stay the same objects and become views of this rank's part of the flat
tensor: of each parameter a contiguous run of its elements, as a tensor of shape (n,), where n may be 0.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, _runtime_utils
from torch.optim import Optimizer

from flk_runtime.checkpoint import Piece, State, boxes, pieces_of
from flk_runtime.errors import SetupError
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.precision import Precision
from flk_runtime.system.pytree import map_leaves

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

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
        self._evaluated = False  # whether the latest forward pass was one without gradients
        root.register_forward_hook(self._note_forward_pass)

    def _note_forward_pass(self, *_: Any) -> None:
        self._evaluated = not torch.is_grad_enabled()

    def attach(self, optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self._reshard())

    def _reshard(self) -> None:
        """Free the full parameters that an evaluation has left: an optimizer step would not change them."""
        if self._evaluated and self._numels is not None:
            for module in FullyShardedDataParallel.fsdp_modules(self.module):
                if module._handle is not None and not module._handle.needs_unshard():
                    _runtime_utils._reshard(module, module._handle, free_unsharded_flat_param=True)
        self._evaluated = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.module.no_sync()

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        norm = self.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"cannot clip gradients: their norm is {norm.item()}")
        return norm

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters)

    def save_state(self, name: str) -> State:
        self._reshard()
        pieces, plain = [], {}
        main = dist.get_rank() == 0
        for key in self._keys:
            if key in self._parameters:
                pieces += self._run(self._parameters[key], (name, key), self._parameters[key].detach())
            elif key.rpartition(".")[2] == _EXTRA:
                plain[key] = self._module_of(key).get_extra_state()
            elif main:
                pieces += pieces_of((name, key), self._module_of(key).get_buffer(key.rpartition(".")[2]))
        return State(pieces, plain)

    def load_state(self, saved: SavedObject) -> None:
        pieces = []
        for key in self._keys:
            if key in self._parameters:
                pieces += self._run(self._parameters[key], (saved.name, key), self._parameters[key].detach())
            elif key.rpartition(".")[2] == _EXTRA:
                self._module_of(key).set_extra_state(saved.plain[key])
            else:
                pieces += pieces_of((saved.name, key), self._module_of(key).get_buffer(key.rpartition(".")[2]))
        saved.checkpoint.read(pieces)

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        return self._shapes[id(parameter)]

    def state_pieces(self, path: tuple[str | int, ...], parameter: nn.Parameter, value: torch.Tensor) -> list[Piece]:
        if self._numels is None:
            return pieces_of(path, value)
        numels, rank = self._numels[id(parameter)], self._group.rank()
        if not numels[rank]:
            return []  # the optimizer has no state for it here, or an outdated one from a checkpoint
        if value.dim() == 1 and value.numel() == numels[rank]:
            return self._run(parameter, path, value)
        first = next(index for index, numel in enumerate(numels) if numel)
        return pieces_of(path, value) if rank == first else []  # it is no shard, and ranks may hold different ones

    def empty_state(
        self, path: tuple[str | int, ...], parameter: nn.Parameter, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[Piece]]:
        value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return value, self._run(parameter, path, value)

    def _run(self, parameter: nn.Parameter, path: tuple[str | int, ...], local: torch.Tensor) -> list[Piece]:
        """The boxes of the full parameter that ``local`` holds, this rank's run of its elements, as views."""
        if self._numels is None:
            return pieces_of(path, local)
        numels = self._numels[id(parameter)]
        rank = self._group.rank()
        if local.numel() != numels[rank]:
            raise SetupError(
                "cannot save a checkpoint between a forward pass and its backward pass: save after optimizer.step()"
            )
        shape = tuple(self.full_shape(parameter))
        begin = sum(numels[:rank])
        pieces, done = [], 0
        for offsets, size in boxes(begin, begin + numels[rank], shape):
            numel = torch.Size(size).numel()
            pieces.append(Piece(path, local[done : done + numel].view(size), shape, offsets))
            done += numel
        return pieces

    def _module_of(self, key: str) -> nn.Module:
        """The module that has the parameter, buffer or extra state of this key."""
        module: nn.Module = self._modules[key.rpartition(".")[0]]
        return module

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor | None:
        if self._numels is None:
            return parameter.detach()
        numels = self._numels[id(parameter)]
        padded = parameter.new_zeros(max(numels))
        padded[: parameter.numel()] = parameter.detach()
        gathered = [torch.empty_like(padded) for _ in numels]
        dist.all_gather(gathered, padded, group=self._group)
        shards = [each[:numel] for each, numel in zip(gathered, numels, strict=True)]
        return torch.cat(shards).view(self.full_shape(parameter))

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        if self._numels is None:
            return full
        numels = self._numels[id(parameter)]
        begin = sum(numels[: self._group.rank()])
        return full.flatten()[begin : begin + numels[self._group.rank()]].clone()

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


@contextlib.contextmanager
def _no_shard_warning_ignored() -> Iterator[None]:
    """Ignore torch's warning that NO_SHARD, or a world of one, does not need FSDP: the user asked for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield
