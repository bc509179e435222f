"""Strategies: a table of strategies that shard and replicate, and `parallelize`, which applies one to a model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from flk_runtime.checkpoint import is_sharded, roots_of
from flk_runtime.contract import user_env
from flk_runtime.contract.strategies import parse_strategy
from flk_runtime.contract.variable import is_count
from flk_runtime.errors import SetupError
from flk_runtime.parallel import replaced
from flk_runtime.parallel.blocks import find_blocks, sharded_units
from flk_runtime.parallel.compilation import check_recomputed, compile_module
from flk_runtime.parallel.meta_init import RESETS, Materializer, check_init, meta_names
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.options import Parallelizer, ParallelOptions
from flk_runtime.parallel.precision import Precision
from flk_runtime.parallel.rebind import rebind_optimizers
from flk_runtime.parallel.shardable import check_shardable
from flk_runtime.system.torch_version import require_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from flk_runtime.parallel.mesh import Mesh


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
# Optimizers that flatten or index whole parameters, which DTensor refuses in the middle of a step.
_OF_WHOLE_PARAMETERS = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop)
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


Planner = Callable[[nn.Module, Sequence[Optimizer], ParallelOptions], ParallelModel]
_planner: Planner | None = None


@contextlib.contextmanager
def planned_by(planner: Planner) -> Iterator[None]:
    """Inside, `parallelize` applies nothing, and ``planner`` answers with its arguments: a script is planned."""
    global _planner
    _planner = planner
    try:
        yield
    finally:
        _planner = None


def choose_strategy(strategy: str | None) -> str:
    """The strategy to use: the argument, else $FLK_STRATEGY, else ddp. Raises SetupError for an unknown name."""
    name = strategy or user_env.STRATEGY.read(os.environ)
    try:
        return parse_strategy(name)
    except ValueError as error:
        source = "" if strategy else f" (from {user_env.STRATEGY})"
        raise SetupError(f"{error}{source}") from None


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
    if _planner is not None:
        return _planner(model, optimizers, options)
    _check_precision(options.precision)
    if STRATEGIES[strategy].shards or (options.precision and not _parallelized_by_script(model)):
        _check_fsdp2(options, strategy, device)
    for name, each in model.named_parameters():
        if is_lazy(each):
            raise SetupError(
                f"{name!r} of a lazy module has no shape yet: call the model on a batch before parallelize"
            )
    _check_shared(model)
    _check_model(model, strategy, options)
    if STRATEGIES[strategy].shards or (world_size > 1 and strategy != "none"):
        _check_max_norm(model)
    _check_optimizers(optimizers, strategy, options)
    unset = meta_names(model)
    if not (strategy == "none" and _parallelized_by_script(model)):
        check_init(unset, options.init)
    _check_prefetch(options.prefetch)
    _check_offload(options.offload, strategy)
    sizes, function = _own_parallelism(model, strategy, options)
    ranks = 1  # that get the same data
    if function:
        from flk_runtime.parallel.mesh import check_pipeline, check_sizes, make_mesh, modules_at, places_of, split

        ranks = check_sizes(sizes, world_size)
        check_pipeline(sizes, model, optimizers, options.save_frozen)
    init = options.init if unset and (options.init != RESETS or function) else None
    shard_size = _shard_size(strategy, options.shard_size, world_size // ranks, max(1, local_world_size // ranks))
    blocks = find_blocks(model, options.blocks)
    if cause := _what_shards(strategy, options):
        check_shardable(model, sharded_units(model, blocks, options.precision, ends=options.blocks is None), cause)
    recomputed: list[nn.Module] = []
    if options.recompute is not False:
        from flk_runtime.parallel.recompute import find_recomputed, recompute_activations

        recomputed = find_recomputed(model, blocks, options.recompute)
    check_recomputed(recomputed, options.compile)
    reshards = _reshards(STRATEGIES[strategy], options.reshard_after_forward, shard_size)

    def apply() -> ParallelModel:
        mesh, held, own, again = None, model, blocks, recomputed
        if function:
            mesh = make_mesh(sizes, device, world_size, shard_size)
            places = places_of(model, blocks), places_of(model, recomputed)
            held = split(model, function, mesh, device)
            own, again = (modules_at(held, each) for each in places)
        for each in again:
            recompute_activations(each)
        for module in (own or roots_of(held)) if options.compile else ():
            # After the recomputation, so that the compiler sees what is kept and what is computed again.
            compile_module(module, options.compile)
        return _parallelize(
            held,
            own,
            strategy,
            options,
            device=device,
            world_size=world_size,
            shard_size=shard_size,
            reshards=reshards,
            mesh=mesh,
        )

    parallel = rebind_optimizers(optimizers, model, apply, strict=strategy != "none")
    if init is not None:
        from flk_runtime.parallel.initialize import initialize

        initialize(parallel, init, unset, broadcast=strategy != "none", resets=function is not None)
    if not options.save_frozen:
        if not parallel.named:
            raise SetupError("save_frozen=False needs the parameters of the model, which FSDP1 flattens: use FSDP2")
        from flk_runtime.parallel.frozen import FrozenParameters

        frozen = FrozenParameters(parallel)
        parallel.state.left_out = frozen.names
        parallel.beside = {**parallel.beside, "frozen": frozen}
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
    reshards: bool | int,
    mesh: Mesh | None,
) -> ParallelModel:
    kind, init_follows = STRATEGIES[strategy], options.init not in (None, RESETS) or mesh is not None
    if strategy == "none" and _parallelized_by_script(model):
        return ParallelModel(model)  # and it stays where the script has put it
    if not kind.shards and options.precision is None:
        Materializer(model, (), device, init_follows=init_follows).run(lambda module: None, broadcast=False)
        model.to(device)  # some modules (nn.LSTM) rearrange their parameters when they are moved
        if strategy == "none" or world_size == 1:
            return ParallelModel(model)
        from flk_runtime.parallel import ddp

        if not any(each.requires_grad for each in model.parameters()):
            return ddp.FrozenModel(model)
        return ddp.DDPModel(model, device, find_unused_parameters=options.find_unused_parameters)
    from flk_runtime.parallel import fsdp2

    if mesh:
        from flk_runtime.parallel.mesh_model import MeshModel

        return MeshModel(model, blocks, mesh, device, options, reshards=reshards, init_follows=init_follows)
    over, broadcast = (
        (_own_mesh(device), False) if strategy == "none" else (_device_mesh(device, world_size, shard_size), True)
    )
    return fsdp2.FSDP2Model(
        model, blocks, over, device, options, broadcast=broadcast, reshards=reshards, init_follows=init_follows
    )


def _own_parallelism(
    model: nn.Module, strategy: str, options: ParallelOptions
) -> tuple[Mapping[str, int], Parallelizer | None]:
    """The dimensions of the script's own parallelism, and the function that applies it; none by default."""
    given = next((each for each in ("mesh", "parallelize", "tp", "tp_plan") if getattr(options, each) is not None), "")
    if not given:
        return {}, None
    if not STRATEGIES[strategy].shards:
        raise SetupError(f"{given}= needs a strategy that shards, and this run has {strategy}: use full_shard")
    if options.tp is None and options.tp_plan is None:
        from flk_runtime.parallel.mesh import CONTEXT

        if not options.mesh or not callable(options.parallelize):
            raise SetupError("mesh= and parallelize= need each other: pass sizes of dimensions, and a function")
        if STRATEGIES[strategy].replicates and CONTEXT in options.mesh:
            raise SetupError(
                f"the mesh has a dimension {CONTEXT}, which strategy {strategy} cannot use: use full_shard"
            )
        return options.mesh, options.parallelize
    if options.tp is None or options.mesh is not None or options.parallelize is not None:
        raise SetupError(f"{given}=: pass tp= with or without tp_plan=, or mesh= and parallelize=")
    from flk_runtime.parallel.tensor_parallel import by_plan

    return {"tp": options.tp}, by_plan(model, options.tp_plan)


def _check_fsdp2(options: ParallelOptions, strategy: str, device: torch.device) -> None:
    """Raise SetupError where FSDP2 lacks something in the oldest torch that flk works with."""
    what = f"strategy {strategy}" if STRATEGIES[strategy].shards else "precision="
    if device.type == "cpu":
        require_torch("2.7", f"{what} on CPUs")
    if options.find_unused_parameters:
        require_torch("2.13", f"{what} with find_unused_parameters")


def _check_precision(precision: object) -> None:
    if precision is not None and not isinstance(precision, Precision):
        raise SetupError(f"precision={precision!r}: expected a flk_runtime.Precision")


def _check_prefetch(blocks: object) -> None:
    if blocks is not None and not is_count(blocks, 1):
        raise SetupError(f"prefetch={blocks!r}: expected a number of blocks from 1 on")


def _check_offload(place: object, strategy: str) -> None:
    if place not in (None, "cpu"):
        raise SetupError(f"offload={place!r}: expected 'cpu'")
    if place and not STRATEGIES[strategy].shards:
        raise SetupError(f"offload={place!r}: strategy {strategy} has no shards to move: use one that shards")


def _check_shared(model: nn.Module) -> None:
    """Raise SetupError for a parameter that the model shared with another one, in which it has been replaced."""
    for name, parameter in model.named_parameters():
        if replaced.name_of(parameter):
            raise SetupError(
                f"{name!r} was shared with a model that has been parallelized, and would no longer be: put both models "
                "into one module, and parallelize that"
            )


def _check_model(model: nn.Module, strategy: str, options: ParallelOptions) -> None:
    found = _parallelized_by_script(model)
    if found and strategy != "none":
        raise SetupError(
            f"{found}: pass the model that is not wrapped, put models that share modules into one, or use strategy none"
        )
    if found and options.precision is not None:
        raise SetupError(f"{found}, and precision= would have no effect on it: give its wrapper the dtypes")


def _check_max_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None:  # an embedding, whose forward pass changes its weight
            raise SetupError(f"{name!r} has a max_norm, for which each rank would change other rows: leave it out")


def is_wrapper(kind: type[nn.Module]) -> bool:
    """Whether modules of a class are torch's wrappers DDP or FSDP, or sharded by fully_shard."""
    return any(each.__name__ in _WRAPPERS and each.__module__.startswith("torch.") for each in kind.__mro__)


def _parallelized_by_script(model: nn.Module) -> str:
    """What torch has wrapped or sharded in ``model`` already, in words; empty if there is nothing."""
    for name, module in model.named_modules():
        if is_wrapper(type(module)):
            return f"{name or 'the model'} is already wrapped in {type(module).__name__}"
    shared = "by the script, or with another parallelized model, which it shares modules with"
    names = (name for name, each in model.named_parameters() if is_sharded(each))
    return next((f"{name!r} is already sharded, {shared}" for name in names), "")


def _check_optimizers(optimizers: Sequence[Optimizer], strategy: str, options: ParallelOptions) -> None:
    if cause := _what_shards(strategy, options):
        for each in optimizers:
            if isinstance(each, _OF_WHOLE_PARAMETERS):
                raise SetupError(
                    f"{type(each).__name__} of torch cannot train parameters that {cause} shards: use another "
                    "optimizer, or strategy ddp without precision="
                )


def _what_shards(strategy: str, options: ParallelOptions) -> str:
    """What has the parameters sharded, in words; empty if they stay whole."""
    return f"strategy {strategy}" if STRATEGIES[strategy].shards else "precision=" if options.precision else ""


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


def _reshards(kind: Strategy, ranks: int | None, shard_size: int) -> bool | int:
    """Whether a block's parameters are freed after its forward pass, or over how many ranks they stay sharded then."""
    if ranks is None or not kind.reshards:
        return kind.reshards
    if not is_count(ranks, 2) or shard_size % min(ranks, shard_size):
        raise SetupError(
            f"reshard_after_forward={ranks!r}: expected a number of ranks from 2 on that divides the {shard_size} of a "
            "shard group"
        )
    return ranks if ranks < shard_size else True


def _device_mesh(device: torch.device, world_size: int, shard_size: int) -> DeviceMesh:
    """The ranks with the dimension shard, or with replicate and shard if there are several shard groups."""
    from torch.distributed.device_mesh import init_device_mesh

    if shard_size == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _own_mesh(device: torch.device) -> DeviceMesh:
    """A mesh of this rank alone."""
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
