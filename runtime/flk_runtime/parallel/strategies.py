"""Strategies: a table of strategies that shard and replicate, and `parallelize`, which applies one to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.contract import user_env
from flk_runtime.contract.variable import is_count
from flk_runtime.errors import SetupError, setting
from flk_runtime.parallel.blocks import find_blocks
from flk_runtime.parallel.checks import check_fsdp2, check_model, check_shardable, parallelized_by_script
from flk_runtime.parallel.computation import (
    check_compiles,
    check_recomputed,
    compile_module,
    recompute_activations,
)
from flk_runtime.parallel.initialize import allocate, check_init, initialize, meta_names
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.options import ParallelOptions
from flk_runtime.parallel.rebind import rebind_optimizers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Strategy:
    """A strategy: whether it shards and replicates a model's parameters, gradients and optimizer state."""

    shards: bool = False  # they are split over the ranks of a shard group
    replicates: bool = False  # there are several shard groups, each with all of the model
    reshards: bool = False  # full parameters of a block are freed after its forward pass and gathered for the backward


# The names are from torch's ShardingStrategy, in lower case. The sharding is ZeRO's, stages 2 and 3 (Rajbhandari
# et al., arXiv 1910.02054), and hybrid sharding is PyTorch FSDP's (Zhao et al., arXiv 2304.11277, section 3.2.2).
STRATEGIES = {
    "none": Strategy(),
    "ddp": Strategy(),
    "no_shard": Strategy(),  # ddp by FSDP's name
    "shard_grad_op": Strategy(shards=True),
    "full_shard": Strategy(shards=True, reshards=True),
    "hybrid_shard": Strategy(shards=True, replicates=True, reshards=True),
    "hybrid_shard_zero2": Strategy(shards=True, replicates=True),
}


def parallelize(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: str,
    options: ParallelOptions,
    *,
    device: torch.device,
    world_size: int,
    local_world_size: int,
) -> ParallelModel:
    """Shard or replicate ``model`` over all ranks, and give ``optimizers`` the parameters of the result. Collective.

    ``world_size`` is the number of ranks, ``local_world_size`` the number of ranks on this rank's node. Raises
    SetupError, on all ranks and before any communication, if the options contradict each other or do not fit the model.
    """
    kind, cause = STRATEGIES[strategy], _what_shards(strategy, options)
    check_model(model, strategy, options, replicates=kind.shards or (world_size > 1 and strategy != "none"))
    if cause:
        check_fsdp2(optimizers, cause, options, device)
    unset = [] if parallelized_by_script(model) else meta_names(model)
    check_init(unset, options.init)
    shard_size = _shard_size(strategy, options.shard_size, world_size, local_world_size)
    blocks = find_blocks(model, options.blocks)
    if cause:
        check_shardable(model, blocks, options, cause)
    if not isinstance(options.recompute, bool):
        raise SetupError(f"recompute={options.recompute!r}: expected True or False, for the blocks that blocks= names")
    recomputed = blocks if options.recompute else []
    if options.recompute and not blocks:
        raise SetupError("recompute=True needs blocks, and the model has none: name their class, as in blocks='Block'")
    check_recomputed(recomputed, options.compile)
    if options.compile:
        check_compiles()

    def apply() -> ParallelModel:
        for each in recomputed:
            recompute_activations(each)
        for module in (blocks or [model]) if options.compile else ():
            # After the recomputation, so that the compiler sees what is kept and what is computed again.
            compile_module(module, options.compile)
        return _parallelize(
            model, blocks, strategy, options, device=device, world_size=world_size, shard_size=shard_size
        )

    parallel = rebind_optimizers(optimizers, model, apply, strict=strategy != "none")
    if unset:
        initialize(parallel, options.init, unset, broadcast=strategy != "none")
    return parallel


def _parallelize(
    model: nn.Module,
    blocks: list[nn.Module],
    strategy: str,
    options: ParallelOptions,
    *,
    device: torch.device,
    world_size: int,
    shard_size: int,
) -> ParallelModel:
    kind = STRATEGIES[strategy]
    if strategy == "none" and parallelized_by_script(model):
        return ParallelModel(model)  # and it stays where the script has put it
    if not kind.shards and options.precision is None:
        allocate(model, device)
        model.to(device)  # some modules (nn.LSTM) rearrange their parameters when they are moved
        if strategy == "none" or (world_size == 1 and setting(user_env.STANDS_FOR) == 1):
            return ParallelModel(model)
        from flk_runtime.parallel import ddp

        if not any(parameter.requires_grad for parameter in model.parameters()):
            return ddp.FrozenModel(model)
        return ddp.DDPModel(model, device, find_unused_parameters=options.find_unused_parameters)
    from flk_runtime.parallel import fsdp2

    over, broadcast = (
        (_own_mesh(device), False) if strategy == "none" else (_device_mesh(device, world_size, shard_size), True)
    )
    return fsdp2.FSDP2Model(model, blocks, over, device, options, broadcast=broadcast, reshards=kind.reshards)


def _what_shards(strategy: str, options: ParallelOptions) -> str:
    """The option by which parameters are sharded, in words; empty if they stay whole."""
    if STRATEGIES[strategy].shards:
        return f"strategy {strategy}"
    return "precision=" if options.precision else ""


def _shard_size(strategy: str, given: int | None, world_size: int, local_world_size: int) -> int:
    """The number of ranks in a shard group: by default all ranks, or a node's ranks for a hybrid strategy."""
    kind = STRATEGIES[strategy]
    if not kind.shards:
        return 1
    if not kind.replicates:
        return world_size
    size = local_world_size if given is None else given
    if not is_count(size, 1) or world_size % size:
        what = f"shard_size={given!r}" if given is not None else f"the number of ranks per node, {size},"
        raise SetupError(f"{what} does not divide the world size, {world_size}: pass a shard_size that does")
    return size


def _device_mesh(device: torch.device, world_size: int, shard_size: int) -> DeviceMesh:
    """The ranks with the dimension shard, or with replicate and shard if there are several shard groups. Collective."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    ranks = torch.arange(world_size, device="cpu").view(-1, shard_size)
    # init_device_mesh splits the process group where NCCL is bound to a device: torch 2.8 refuses that for one that has
    # gloo too, and before 2.8 the groups have no gloo.
    groups = [
        dist.new_group(members.tolist(), use_local_synchronization=True)
        for members in (ranks[:, dist.get_rank() % shard_size], ranks[dist.get_rank() // shard_size])
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _own_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of this rank alone."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(
        dist.new_group([dist.get_rank()], use_local_synchronization=True), device.type, mesh_dim_names=("shard",)
    )
