"""``python -m flk_runtime check``: a job's start and nothing else. The ranks meet, compare and reduce one number.

Under any launcher (``srun python -m flk_runtime check``, ``torchrun -m flk_runtime check``, ``flk run --check``).
Rank 0 prints one screen. Ends with 0, or with 2 and what is wrong.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping

from flk_runtime import contract
from flk_runtime.contract import ExitCode
from flk_runtime.errors import SetupError
from flk_runtime.preflight import RankReport
from flk_runtime.system import report

MODULE = "flk_runtime.check"  # what a launcher starts as its ranks


def is_pod(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the first of a pod, flk's or another operator's, whose ranks are still to be started."""
    pod = (contract.PODS, contract.PROCESSES, contract.RDZV_ENDPOINT, "PET_NODE_RANK")
    return not environ.keys() & {contract.ATTEMPT, "LOCAL_RANK"} and any(environ.get(name) for name in pod)


def main() -> int:
    """This rank's part; the exit code. Collective."""
    number = None
    # A launcher ends the others when the first rank ends; rank 0 may then still have to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's own warnings would bury the one sentence
    try:
        from flk_runtime.discovery import discover

        place = discover()
        number = place.rank
        from flk_runtime.distributed import process_group as group
        from flk_runtime.initialize import InitOptions, open_group, rank_report
        from flk_runtime.preflight import TIMEOUT

        choices = InitOptions.read(place, {}, defer_error=True)
        choices = dataclasses.replace(choices, preflight=choices.preflight or TIMEOUT)
        if choices.error and place.world_size == 1:
            raise choices.error
        began = time.monotonic()
        everybody = open_group(place, choices)
        opened = time.monotonic()
        _reduce(choices.device)
        done = time.monotonic()
        if place.rank == 0:
            for line in screen(everybody or [rank_report(place, choices)], opened - began, done - opened):
                print(line, flush=True)
        group.leave(at_once=False)
    except SetupError as error:
        report.send(report.describe(error) | {"kind": "usage"})  # another attempt would find the same
        if number == 0 or not error.everywhere:
            print("\n".join(f"fault     {line}" for line in str(error).splitlines()), flush=True)
        return int(ExitCode.USAGE)
    return int(ExitCode.DONE)


def _reduce(device: object) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1, device=device)  # type: ignore[call-overload]
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise SetupError(f"an all-reduce of ones over {dist.get_world_size()} ranks gave {total.item():g}")


def screen(everybody: list[RankReport], opened: float, reduced: float) -> list[str]:
    """What a user sees where nothing is wrong: a line for each node, at most 16; times in seconds."""
    first = min(everybody, key=lambda one: one.rank)
    nodes: dict[str, list[RankReport]] = {}
    for one in sorted(everybody, key=lambda one: one.rank):
        nodes.setdefault(one.node, []).append(one)
    ranks = f"{len(everybody)} on {_plural(len(nodes), 'node')}"
    lines = [
        f"ranks     {ranks}, launcher: {first.launcher}",
        f"torch     {first.torch}, flk {first.flk}, Python {platform.python_version()}",
        f"backend   {first.backend}",
    ]
    for node, here in list(nodes.items())[:16]:
        ranks = f"{_plural(len(here), 'rank')} from {here[0].rank} on"
        devices = ", ".join(dict.fromkeys(one.device for one in here))
        size = f"{here[0].shm / (1 << 20):,.0f} MiB" if here[0].shm >= 0 else "none"
        interface = f", interface {here[0].interface}" if here[0].interface else ""
        lines.append(f"node      {node}: {ranks}, {devices}{interface}, /dev/shm {size}")
    if len(nodes) > 16:
        lines.append(f"          … and {len(nodes) - 16} more nodes")
    return [
        *lines,
        f"start     {opened:.3f} s until the group was open, {reduced:.3f} s for the first all-reduce",
        "ok",
    ]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


if __name__ == "__main__":
    sys.exit(main())
