"""A contiguous share of any sequence: for scripts that load, evaluate or preprocess with their own means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, overload

import torch.distributed as dist

from flk_runtime.errors import SetupError


class Indexed(Protocol):
    """What has a length and an index: a list, an array, a tensor, a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def shard_range(length: int, rank: int, world_size: int) -> range:
    """The indices that a rank gets: in order, every index once, the first ``length % world_size`` ranks one more.

    With fewer indices than ranks the last ranks get none.
    """
    size, more = divmod(length, world_size)
    begin = rank * size + min(rank, more)
    return range(begin, begin + size + (rank < more))


class DataShard(Sequence[Any]):
    """A view of a rank's share of ``data``, made by `shard`. Elements are read when asked for."""

    def __init__(self, data: Indexed, indices: range) -> None:
        self._data = data
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> DataShard: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return DataShard(self._data, self.indices[index])
        try:
            place = self.indices[index]
        except IndexError:
            raise IndexError(f"{index} in a share of {len(self)} elements") from None
        return self._data[place]

    def __repr__(self) -> str:
        return f"<elements {self.indices.start} to {self.indices.stop - 1} of {len(self._data)}>" if self else "<none>"


def shard(data: Indexed, rank: int | None = None, world_size: int | None = None) -> DataShard:
    """This rank's share of ``data``: one contiguous piece, each element on exactly one rank.

    Sizes differ by at most one. Where there are fewer elements than ranks the last ranks' shares are empty, so a loop
    that contains a collective needs `Run.loader` instead. ``rank`` and ``world_size`` come from the process group;
    where there is none, both have to be given. Raises SetupError for data without length and index, or an impossible
    rank.
    """
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or hasattr(data, "keys"):
        raise SetupError(f"shard: {type(data).__name__} has no length and index")
    if isinstance(data, DataShard):
        raise SetupError("shard: the data is a rank's share already; a share of it would leave out the rest")
    if rank is None or world_size is None:
        if not dist.is_initialized():
            raise SetupError("shard needs the process group, or rank and world_size: call flk_runtime.init() before")
        rank = dist.get_rank() if rank is None else rank
        world_size = dist.get_world_size() if world_size is None else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise SetupError(f"shard: rank={rank} of world_size={world_size}: expected 0 <= rank < world_size")
    return DataShard(data, shard_range(len(data), rank, world_size))
