"""entered() and open_group(): connect to the other ranks, run the preflight check, and open the process group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flk_runtime.contract import VERSION
from flk_runtime.discovery import RankInfo, discover
from flk_runtime.distributed import process_group
from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.preflight import RankReport, exchange_reports, report, warning
from flk_runtime.preflight.bootstrap import connect_store
from flk_runtime.shared import progress
from flk_runtime.shared.progress import Phase
from flk_runtime.system import device as devices
from flk_runtime.training.options import RunOptions

_ERROR_TIMEOUT: Final = 10.0  # seconds that a rank which cannot start waits for the others, to tell them why


@contextlib.contextmanager
def entered(given: dict[str, Any]) -> Iterator[tuple[RankInfo, RunOptions, bool]]:
    """Be in the process group, as this rank, with the options from ``given``; tell whether it was opened here.

    ``given`` are arguments of `init`. A group that was opened here is left if the block raises. Raises SetupError as
    `init` does. Collective.
    """
    _refuse_imports()
    rank_info = discover()
    progress.own_page().phase = Phase.RENDEZVOUS
    owns_group = not dist.is_initialized()
    options = RunOptions.read(rank_info, given, defer_error=owns_group)
    if owns_group:
        open_group(rank_info, options)
    elif options.error:
        raise options.error
    try:
        yield rank_info, options, owns_group
    except BaseException:
        if owns_group:
            process_group.leave(at_once=True)
        raise


def _refuse_imports() -> None:
    """Raise SetupError if a process of multiprocessing imports the script: it would be this rank a second time."""
    if hasattr(multiprocessing.current_process(), "_inheriting"):
        raise SetupError(
            "multiprocessing starts a process anew, such as a worker of a DataLoader, and it imports the script, which "
            'would train in it too: put all that trains behind if __name__ == "__main__":, or start the process by '
            'fork, as with DataLoader(multiprocessing_context="fork")'
        )


def open_group(rank_info: RankInfo, options: RunOptions) -> list[RankReport]:
    """Connect to the other ranks, run the preflight check, and open the process group. Collective.

    Returns the reports of all ranks on rank 0 if they were compared, else an empty list. Raises SetupError as `init`
    does.
    """
    reports: list[RankReport] = []
    if rank_info.world_size > 1:
        store, reports = _meet(rank_info, options)
        store.set_timeout(timedelta(seconds=options.timeout))
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
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


def _meet(rank_info: RankInfo, options: RunOptions) -> tuple[Any, list[RankReport]]:
    """Connect to the store and run the preflight check. A rank that cannot start tells the others if they are there."""
    began = time.monotonic()
    limit = options.preflight or options.timeout
    if options.error:
        limit = min(limit, _ERROR_TIMEOUT)
    try:
        store = connect_store(rank_info, limit)
        reports = _run_preflight(store, rank_report(rank_info, options), options, limit, began)
    except RendezvousError:
        if options.error:
            raise options.error from None
        raise
    return store, reports


def _run_preflight(store: Any, own: RankReport, options: RunOptions, timeout: float, began: float) -> list[RankReport]:
    if not options.preflight:
        return []
    reports = exchange_reports(store, own, timeout, began, options.skipped)
    if line := warning(reports):
        print(f"flk: {line}", file=sys.stderr, flush=True)
    return reports


def rank_report(rank_info: RankInfo, options: RunOptions) -> RankReport:
    """This rank's report for the preflight check, which compares the reports of all ranks."""
    return RankReport(
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        local_rank=rank_info.local_rank,
        local_world_size=rank_info.local_world_size,
        node_rank=rank_info.node_rank,
        pid=os.getpid(),
        launcher=rank_info.launcher,
        torch=torch.__version__,
        flk=VERSION,
        code=report.code_version(),
        backend=options.backend,
        strategy=str(options.outer or options.strategy),
        seed=options.seed,
        device=str(options.device),
        gpu=devices.unique_id(options.device),
        problem=str(options.error or ""),
        **report.node_fields(),
    )
