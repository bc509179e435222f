"""Group: a process group of a script that is planned. Only rank 0 exists, and the others do the same as it does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

_NAME = "flk_plan"


class _Done(dist.Work):
    """A collective that has ended; torch 2.6 has none of its own."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Alike(dist.ProcessGroup):
    """Collectives as if all ranks gave this rank's tensors."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._size = size

    @property
    def group_name(self) -> Any:
        return _NAME

    def getBackendName(self) -> str:
        return _NAME

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for each in tensors:
                each.mul_(self._size)
        return _Done()

    def allgather(self, gathered: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        for results, own in zip(gathered, given, strict=True):
            for each in results:
                each.copy_(own)
        return _Done()

    def gather(self, gathered: list[list[torch.Tensor]], given: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self.allgather(gathered, given[: len(gathered)])  # none where another rank gathers

    def all_gather_single(self, gathered: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.allgather([list(gathered.view(self._size, *given.shape))], [given])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the name in older releases of torch

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return _Done()

    def barrier(self, opts: Any = None) -> Any:
        return _Done()


def open_group(world_size: int) -> None:
    """Open the process group of ``world_size`` ranks, of which this one is rank 0."""
    dist.Backend.register_backend(_NAME, lambda store, rank, size, timeout: _Alike(rank, size), devices=["cpu"])
    dist.init_process_group(_NAME, store=FakeStore(), rank=0, world_size=world_size)
