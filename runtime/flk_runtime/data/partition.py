"""shard(): one rank's contiguous shard of a sequence, for scripts that load, evaluate or preprocess on their own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Subset

from flk_runtime.errors import SetupError


def shard_range(length: int, rank: int, world_size: int) -> range:
    """The indices of a rank: in order, each on one rank, the first ``length % world_size`` ranks have one more.

    With fewer indices than ranks, the last ranks have none.
    """
    size, more = divmod(length, world_size)
    begin = rank * size + min(rank, more)
    return range(begin, begin + size + (rank < more))


def shard(data: Any, rank: int | None = None, world_size: int | None = None) -> Subset[Any]:
    """This rank's contiguous shard of ``data``, which is read when it is indexed; each element is in one shard.

    Sizes differ by at most one. With fewer elements than ranks, the last ranks' shards are empty, so a loop that
    contains a collective needs `Run.loader` instead. ``rank`` and ``world_size`` are by default the process group's.
    This is DistributedDataContainer of Lux.jl's DistributedUtils.

    Raises SetupError for data without length and index, for a rank outside of [0, world_size), and where there is
    neither a process group nor both numbers.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or hasattr(data, "keys"):
        raise SetupError(f"shard: {type(data).__name__} has no length and index")
    if rank is None or world_size is None:
        if not dist.is_initialized():
            raise SetupError("shard needs the process group, or rank and world_size: call flk_runtime.init() before")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise SetupError(f"shard: rank={rank} of world_size={world_size}: expected 0 <= rank < world_size")
    return Subset(data, shard_range(len(data), rank, world_size))
