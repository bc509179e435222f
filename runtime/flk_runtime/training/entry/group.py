"""entered() and open_group(): connect to the other ranks, run the preflight check, and open the process group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.contract import VERSION
from flk_runtime.discovery import RankInfo
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.preflight import RankReport, exchange_reports, report
from flk_runtime.preflight.bootstrap import connect_store
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase
from flk_runtime.training.options import RunOptions


@contextlib.contextmanager
def entered(given: dict[str, Any]) -> Iterator[tuple[RankInfo, RunOptions, bool]]:
    """Be in the process group, as this rank, with the options from ``given``; tell whether it was opened here.

    ``given`` are arguments of `init`. A group that was opened here is left if the block raises. Raises SetupError as
    `init` does. Collective.
    """
    if hasattr(multiprocessing.current_process(), "_inheriting"):  # it would be this rank a second time
        raise SetupError(
            "multiprocessing starts a process anew, such as a worker of a DataLoader, and it imports the script, which "
            'would train in it too: put all that trains behind if __name__ == "__main__":, or start the process by '
            'fork, as with DataLoader(multiprocessing_context="fork")'
        )
    rank_info = process_group.place()
    progress.own_page().phase = Phase.RENDEZVOUS
    owns_group = not dist.is_initialized()
    options = RunOptions.read(rank_info, given)
    if owns_group:
        open_group(rank_info, options)
    try:
        yield rank_info, options, owns_group
    except BaseException:
        if owns_group:
            process_group.leave(at_once=True)
        raise


def open_group(rank_info: RankInfo, options: RunOptions) -> list[RankReport]:
    """Connect to the other ranks, run the preflight check, and open the process group. Collective.

    Returns the reports of all ranks on rank 0 if they were compared, else an empty list. Raises SetupError as `init`
    does.
    """
    reports: list[RankReport] = []
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if rank_info.world_size > 1:
        began = time.monotonic()
        store = connect_store(rank_info, options.preflight or options.timeout)
        if options.preflight:
            reports = exchange_reports(store, rank_report(rank_info, options), options.preflight, began)
        store.set_timeout(timedelta(seconds=options.timeout))
    bound: dict[str, Any] = {"device_id": options.device} if "nccl" in options.backend else {}
    if bound:
        # The gloo group beside NCCL's serves small collectives. Without this, all ranks connect to all at the start.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group(
        options.backend,
        store=distributed_c10d.PrefixStore("group", store),
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timedelta(seconds=options.timeout),
        **bound,
    )
    return reports


def rank_report(rank_info: RankInfo, options: RunOptions) -> RankReport:
    """This rank's report for the preflight check, which compares the reports of all ranks."""
    return RankReport(
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        local_world_size=rank_info.local_world_size,
        node=report.node_name(),
        pid=os.getpid(),
        launcher=rank_info.launcher,
        torch=torch.__version__,
        flk=VERSION,
        code=report.code_version(),
        backend=options.backend,
        strategy=str(options.outer or options.strategy),
        seed=options.seed,
        device=str(options.device),
    )
