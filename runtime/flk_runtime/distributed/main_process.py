"""main_process_first(): rank 0 runs a block before all other ranks, for a download or a cache that they then find."""

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
    """Run the block on rank 0 first, then on all other ranks. Collective.

    With ``local``, local rank 0 of every node runs it first, then the other ranks of the nodes: for caches on a node's
    own disk. The block must not call a collective, and may take as long as a collective may (`init`'s timeout).

    An exception in the block of a first rank is raised there, and every other rank raises PeerError with its text.
    Raises SetupError without a process group. The name is the same as in Hugging Face Accelerate.
    """
    if not dist.is_initialized():
        raise SetupError("main_process_first needs the process group: call flk_runtime.init() before")
    if (discover().local_rank if local else dist.get_rank()) != 0:
        _wait_for_first_ranks(None)
        yield
        return
    try:
        yield
    except BaseException as error:
        _wait_for_first_ranks(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise
    _wait_for_first_ranks(None)


def _wait_for_first_ranks(failure: str | None) -> None:
    """Wait until the first ranks have run the block; ``failure`` is this rank's own, if it is one of them.

    Raises PeerError if another rank failed. Collective.
    """
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
