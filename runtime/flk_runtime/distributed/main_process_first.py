"""One before the others: what a single rank has to do (a download, a cache) and all others want to find done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from flk_runtime.discovery import discover
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import PeerError, SetupError


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """Rank 0 runs the block first, then all others run it. Collective.

    ``local``: the first rank of every node runs it first, then the nodes' others: for caches on a node's own disk. An
    exception of a first rank is raised there, and every other rank raises PeerError with its text, instead of waiting.
    The block may take as long as a collective may (`init`'s timeout), and holds no collective itself.
    """
    if not dist.is_initialized():
        raise SetupError("main_process_first needs the process group: call flk_runtime.init() before")
    if (discover().local_rank if local else dist.get_rank()) != 0:
        _meet(None)
        yield
        return
    try:
        yield
    except BaseException as error:
        _meet(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise
    _meet(None)


def _meet(failure: str | None) -> None:
    """Wait for the first ranks. Unless this is the rank that failed, raise PeerError where one did."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    failed = torch.tensor([world_size if failure is None else rank], device=comm_device(torch.device("cpu")))
    dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    lowest = int(failed)
    if lowest == world_size:
        return
    text = [failure]
    dist.broadcast_object_list(text, src=lowest)
    if failure is None:
        raise PeerError(f"rank {lowest} failed inside main_process_first(): {text[0]}")
