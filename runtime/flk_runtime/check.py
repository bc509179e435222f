"""``python -m flk_runtime check``: the start of a job without its script.

The ranks open the process group, with the preflight, and run one all-reduce, under any launcher:
``srun python -m flk_runtime check``, ``torchrun -m flk_runtime check``, ``flk run --check``. Rank 0 prints a summary.
The exit code is 0, or 2 after an error.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence

from flk_runtime.contract import ExitCode, pod_env, user_env
from flk_runtime.contract.quantities import plural
from flk_runtime.errors import RuntimeFailure, SetupError
from flk_runtime.preflight import RankReport
from flk_runtime.shared import failure_report

MODULE = "flk_runtime.check"  # the module that a launcher starts as its ranks
_PRINTING = 2.0  # seconds that rank 0 has to print what all ranks have found


def must_launch_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process has to start the ranks of its pod, in a job of flk."""
    pod = (pod_env.PODS, pod_env.PROCESSES, pod_env.RDZV_ENDPOINT)
    return not environ.keys() & {user_env.ATTEMPT, "LOCAL_RANK"} and any(environ.get(name) for name in pod)


def main() -> int:
    """Run the check on this rank and return its exit code. Collective."""
    rank = None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings would hide the error
    try:
        from flk_runtime.discovery import discover

        rank_info = discover()
        rank = rank_info.rank
        from flk_runtime.distributed import process_group
        from flk_runtime.training.entry.group import open_group, rank_report
        from flk_runtime.training.options import RunOptions

        options = RunOptions.read(rank_info, {})
        options = dataclasses.replace(options, preflight=options.preflight or user_env.PREFLIGHT_TIMEOUT.default)
        started = time.monotonic()
        reports = open_group(rank_info, options)
        opened = time.monotonic()
        _all_reduce(options.device)
        reduced = time.monotonic()
        if rank == 0:
            for line in summary(reports or [rank_report(rank_info, options)], opened - started, reduced - opened):
                print(line, flush=True)
        process_group.leave(at_once=False)
    except RuntimeFailure as error:
        if rank == 0 or not error.everywhere:
            print("\n".join(f"fault     {line}" for line in str(error).splitlines()), flush=True)
        else:  # launchers terminate all ranks when the first one ends, and rank 0 may still have to print
            time.sleep(_PRINTING)
        failure_report.send(failure_report.describe(error) | {"kind": "usage"})  # a restart would not help
        return int(ExitCode.USAGE)
    return int(ExitCode.DONE)


def _all_reduce(device: object) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1, device=device)  # type: ignore[call-overload]
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise SetupError(f"an all-reduce of ones over {dist.get_world_size()} ranks gave {total.item():g}")


def summary(reports: Sequence[RankReport], open_time: float, reduce_time: float) -> list[str]:
    """Lines about a start without errors, one for each node. Times are in seconds."""
    first = min(reports, key=lambda rank: rank.rank)
    nodes: dict[str, list[RankReport]] = {}
    for rank in sorted(reports, key=lambda rank: rank.rank):
        nodes.setdefault(rank.node, []).append(rank)
    lines = [
        f"ranks     {len(reports)} on {plural(len(nodes), 'node')}, launcher: {first.launcher}",
        f"torch     {first.torch}, flk {first.flk}, Python {platform.python_version()}",
        f"backend   {first.backend}",
    ]
    for node, ranks in nodes.items():
        devices = ", ".join(dict.fromkeys(rank.device for rank in ranks))
        count = f"{plural(len(ranks), 'rank')} from rank {ranks[0].rank}"
        lines.append(f"node      {node}: {count}, {devices}")
    return [
        *lines,
        f"start     {open_time:.3f} s to open the process group, {reduce_time:.3f} s for the first all-reduce",
        "ok",
    ]


if __name__ == "__main__":
    sys.exit(main())
