"""Strategies: how the ranks share the work on one model. The table says what each does; `wrap` finds who does it.

Only what differs between strategies is here: the sharding itself is in ddp.py, fsdp1.py and fsdp2.py, which are
imported when they are needed, since torch's parts behind them take a while to load.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime import contract
from flk_runtime.errors import SetupError
from flk_runtime.parallel import blocks as finding
from flk_runtime.parallel.meta_init import Materializer
from flk_runtime.parallel.model import Handover, ParallelModel
from flk_runtime.parallel.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Strategy:
    """What the ranks hold and when."""

    shards: bool = False  # parameters, gradients and optimizer state
    replicas: bool = False  # sharded within groups of ranks, replicated across them
    reshard: bool = False  # a block's parameters are freed after its forward pass and gathered again for the backward


STRATEGIES = {
    "none": Strategy(),
    "ddp": Strategy(),
    "no_shard": Strategy(),  # ddp under FSDP's name
    "shard_grad_op": Strategy(shards=True),
    "full_shard": Strategy(shards=True, reshard=True),
    "hybrid_shard": Strategy(shards=True, replicas=True, reshard=True),
    "hybrid_shard_zero2": Strategy(shards=True, replicas=True),
}
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
APIS = ("fsdp2", "fsdp1")


@dataclass(frozen=True)
class Options:
    """What `Run.parallelize` was asked for."""

    api: str | None = None
    precision: Precision | None = None
    blocks: finding.Blocks | None = None
    recompute: bool = False
    compile: bool | str = False
    shard_size: int | None = None
    find_unused_parameters: bool = False


def choose(strategy: str | None) -> str:
    """The strategy's name: the argument, else $FLK_STRATEGY, else ddp."""
    name = strategy or os.environ.get(contract.STRATEGY) or "ddp"
    try:
        return contract.parse_strategy(name)
    except ValueError as error:
        where = "" if strategy else f" (from {contract.STRATEGY})"
        raise SetupError(f"{error}{where}") from None


def wrap(
    model: nn.Module,
    optimizer: Optimizer | None,
    strategy: str,
    options: Options,
    *,
    device: torch.device,
    world_size: int,
    local_world_size: int,
) -> ParallelModel:
    """``model`` in the form that trains with all ranks, and its parameters in ``optimizer``. Collective.

    Raises SetupError, on all ranks alike and before any communication, where the options do not go together or with
    the model.
    """
    _check_options(strategy, options)
    _check_model(model, strategy)
    size = _shard_size(strategy, options.shard_size, world_size, local_world_size)
    found = finding.find(model, options.blocks)
    units = finding.units(model, found)
    if options.recompute and not found:
        raise SetupError(
            "recompute=True works on blocks, and none were found in the model: name their class, blocks='Block'"
        )
    handover = Handover(optimizer, model, strict=strategy != "none") if optimizer else None
    if options.recompute or options.compile:
        backend = "inductor" if options.compile is True else options.compile or None
        finding.rewire(found or [model], recompute=options.recompute, backend=backend)
    if handover:
        handover.begin()
    wrapped = _wrap(model, units, strategy, options, device=device, world_size=world_size, shard_size=size)
    if handover:
        handover.end(wrapped)
    return wrapped


def _wrap(
    model: nn.Module,
    units: list[nn.Module],
    strategy: str,
    options: Options,
    *,
    device: torch.device,
    world_size: int,
    shard_size: int,
) -> ParallelModel:
    kind = STRATEGIES[strategy]
    api = options.api or ("fsdp2" if _has_fsdp2() else "fsdp1")
    asked = options.api == "fsdp1" or options.precision is not None
    if strategy == "none" or not (kind.shards or asked):
        Materializer(model, (), device).run(lambda unit: None, broadcast=False)
        model.to(device)  # all of it is there; some modules (nn.LSTM) arrange their parameters when they are told
        if strategy == "none" or world_size == 1:
            return ParallelModel(model)
        from flk_runtime.parallel import ddp

        return ddp.Replicated(model, device, find_unused_parameters=options.find_unused_parameters)
    mesh = _mesh(device, world_size, shard_size)
    if api == "fsdp1":
        from flk_runtime.parallel import fsdp1

        return fsdp1.FlatShard(
            model, units, mesh, device, shards=shard_size > 1, reshard=kind.reshard, precision=options.precision
        )
    from flk_runtime.parallel import fsdp2

    if options.find_unused_parameters and not fsdp2.CAN_FIND_UNUSED:
        raise SetupError(
            f"find_unused_parameters with FSDP2 needs a newer torch than {torch.__version__}, or strategy ddp"
        )
    return fsdp2.FullyShard(
        model,
        units,
        mesh,
        device,
        reshard=kind.reshard,
        precision=options.precision,
        find_unused_parameters=options.find_unused_parameters,
    )


def _check_options(strategy: str, options: Options) -> None:
    if options.api is not None and options.api not in APIS:
        raise SetupError(f"api={options.api!r}: expected one of {', '.join(APIS)}")
    if options.api == "fsdp2" and not _has_fsdp2():
        raise SetupError(f"api='fsdp2' needs torch 2.6, and this is {torch.__version__}: use api='fsdp1'")
    if options.precision is not None and not isinstance(options.precision, Precision):
        raise SetupError(f"precision={options.precision!r}: expected a flk_runtime.Precision")
    if options.find_unused_parameters and options.api == "fsdp1":
        raise SetupError(
            "find_unused_parameters works with DDP and FSDP2: FSDP1 reduces whole units, whatever was used of them"
        )
    if strategy == "none":
        for name in ("api", "precision", "find_unused_parameters"):
            if getattr(options, name):
                raise SetupError(f"{name} has no meaning under strategy none, which leaves the model as it is")


def _check_model(model: nn.Module, strategy: str) -> None:
    if strategy == "none":
        return
    for name, module in model.named_modules():
        if any(kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") for kind in type(module).__mro__):
            raise SetupError(
                f"{name or 'the model'} is in {type(module).__name__} already: give parallelize the model as it was "
                "before, or use strategy none"
            )
    if STRATEGIES[strategy].shards:
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0:
                raise SetupError(
                    f"{name!r} has no dimension that strategy {strategy} could shard: give it the shape (1,)"
                )


def _has_fsdp2() -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)


def _shard_size(strategy: str, asked: int | None, world_size: int, local_world_size: int) -> int:
    """Over how many ranks a parameter is sharded."""
    kind = STRATEGIES[strategy]
    if asked is not None and not kind.replicas:
        hybrids = ", ".join(name for name, each in STRATEGIES.items() if each.replicas)
        raise SetupError(f"shard_size={asked} has no meaning under strategy {strategy}, only under {hybrids}")
    if not kind.shards:
        return 1
    if not kind.replicas:
        return world_size
    size = local_world_size if asked is None else asked
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or world_size % size:
        what = f"shard_size={asked!r}" if asked is not None else f"the number of ranks per node, {size},"
        raise SetupError(f"{what} does not divide the world size, {world_size}: pass a shard_size that does")
    return size


def _mesh(device: torch.device, world_size: int, shard_size: int) -> DeviceMesh:
    """The ranks as (replicate, shard); as (shard) where there is one replica."""
    from torch.distributed.device_mesh import init_device_mesh

    if shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
