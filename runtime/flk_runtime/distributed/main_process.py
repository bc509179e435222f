"""main_process_first(): rank 0 runs a block before all other ranks, for a download or a cache that they then find."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from flk_runtime.distributed import process_group
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
    if (process_group.place().local_rank if local else dist.get_rank()) != 0:
        _wait_for_first_ranks()
        yield
        return
    try:
        yield
    except BaseException as error:
        process_group.all_gather(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        raise
    _wait_for_first_ranks()


def _wait_for_first_ranks() -> None:
    """Wait on a rank that has not failed until the first ranks have run the block. Collective.

    Raises PeerError if one of them has failed.
    """
    failures = process_group.all_gather("")
    failed = next((rank for rank, text in enumerate(failures) if text), None)
    if failed is not None:
        raise PeerError(f"rank {failed} failed inside main_process_first(): {failures[failed]}")
