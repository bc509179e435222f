"""``python -m flk_plan.bench.collectives OUTPUT``: measure collectives of several sizes. Collective.

The result is a list: kind, ranks, stride (distance between the ranks of a group), and sizes: the bytes of the whole
tensor with the seconds that the collective takes. The groups are the strategies' groups: all ranks, the ranks of a
node, and ranks with the same place on their nodes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from flk_runtime.discovery import RankInfo, discover
from flk_runtime.distributed import process_group
from flk_runtime.run.group import open_group
from flk_runtime.run.options import RunOptions
from flk_runtime.system import trial

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce")
_GROWTH: Final = 16
_SIZES: Final = tuple((1 << 12) * _GROWTH**number for number in range(5))  # bytes, up to 256 MiB
_REPEATS: Final = 5
_BUDGET: Final = 2.0  # seconds; a size that would take longer is left out


def measure(info: RankInfo, device: torch.device) -> list[dict[str, Any]]:
    """Measure all kinds in all groups. The process group is open. Collective."""
    found = []
    for ranks, stride in groups_of(info):
        group = _own_group(info, ranks, stride)
        for kind in KINDS:
            sizes = list(_measure_kind(kind, group, ranks, device))
            found.append({"kind": kind, "ranks": ranks, "stride": stride, "sizes": sizes})
    return found


def groups_of(info: RankInfo) -> list[tuple[int, int]]:
    """Number of ranks of each kind of group, and the distance between them."""
    groups = [(info.world_size, 1)]
    if info.two_levels:
        groups += [(info.local_world_size, 1), (info.nodes, info.local_world_size)]
    return groups


def _own_group(info: RankInfo, ranks: int, stride: int) -> Any:
    """The group of this rank among all groups of ``ranks`` ranks that are ``stride`` apart."""
    if ranks == info.world_size:
        return dist.group.WORLD
    firsts = range(0, info.world_size, ranks) if stride == 1 else range(stride)
    members = [[first + stride * number for number in range(ranks)] for first in firsts]
    own, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]
    return own


def _measure_kind(kind: str, group: Any, ranks: int, device: torch.device) -> Iterator[tuple[int, float]]:
    for size in _SIZES:
        operation = _operation(kind, group, size // 4 // ranks, ranks, device)
        operation()
        seconds = []
        for _ in range(_REPEATS):
            dist.barrier()
            _synchronize(device)
            begin = time.perf_counter()
            operation()
            _synchronize(device)
            seconds.append(time.perf_counter() - begin)
        (nanoseconds,) = process_group.maximum(int(statistics.median(seconds) * 1e9))
        slowest = nanoseconds / 1e9  # the same on all ranks
        yield size, slowest
        if slowest * (_REPEATS + 1) * _GROWTH > _BUDGET:
            return


def _operation(kind: str, group: Any, part: int, ranks: int, device: torch.device) -> Callable[[], Any]:
    """A function that runs the collective on a tensor of ``part`` float32 elements for each of the ``ranks``."""
    full, own = torch.zeros(part * ranks, device=device), torch.zeros(part, device=device)
    if kind == "all-gather":
        return lambda: dist.all_gather_into_tensor(full, own, group=group)
    if kind == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(own, full, group=group)
    return lambda: dist.all_reduce(full, group=group)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and write the result."""
    info = discover()
    options = RunOptions.read(info, {"strategy": "ddp"}, defer_error=False)
    open_group(info, options)
    result = measure(info, options.device)
    Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main()
    trial.leave(0)
