"""The network between neighbouring nodes: measured when the group has opened, to name a node or a link that is slow.

It is measured in the first attempt, and in those that follow a suspicious one or have another pod or launcher than the
attempt before, as the leader says. In others the exchange would only make the recovery longer.

The nodes form a ring in the order of their ranks. One rank of each node exchanges data with a rank of both neighbours,
in turns, so that no node measures two links at once. What is compared is the data of one link with the others':
a network that is slow everywhere is no fault. The exchange takes about half a second on each node.

The data goes through the backend for tensors in the memory of the host, which is gloo. So the network of NCCL is not
measured where it is another one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from flk_runtime.contract import pod_env
from flk_runtime.distributed import process_group
from flk_runtime.preflight.report import RankReport

LEAST: Final = 3  # nodes: with fewer there is nothing to compare a link with
_SLOW: Final = 4.0  # times slower than the links of most nodes
_SECONDS: Final = 0.03  # that one exchange shall take
_SMALLEST, _LARGEST = 1 << 20, 64 << 20  # bytes of an exchange
_REPEATS: Final = 5  # the fastest counts, since a busy processor makes some slow


def check(skipped: Collection[str], reports: Sequence[RankReport]) -> None:
    """Measure the links between nodes and print which ones are slow. All ranks with local rank 0 call this.

    ``skipped`` are checks of the preflight, and ``reports`` the reports of all ranks, on rank 0. Rank 0 decides, so
    that the ranks do not wait for each other where FLK_PREFLIGHT differs.
    """
    store, own, cpu = process_group.store(), dist.get_rank(), torch.device("cpu")
    if own == 0:
        wanted = "links" not in skipped and pod_env.LINKS.read(os.environ) and process_group.comm_device(cpu) == cpu
        store.set("links", json.dumps(leads(reports) if wanted else []))
    ring = json.loads(store.get("links"))
    ranks = [rank for rank, _ in ring]
    if own not in ranks:
        return
    place = ranks.index(own)
    store.set(f"links/{place}", str(measure(dist.group.WORLD, ranks, place)))
    if own == 0:
        speeds = [float(store.get(f"links/{each}")) for each in range(len(ranks))]
        for line in slow_links([node for _, node in ring], speeds):
            print(f"flk: {line}", file=sys.stderr, flush=True)


def leads(reports: Sequence[RankReport]) -> list[tuple[int, str]]:
    """The rank that measures for each node, and the node's name, in the order of ranks; empty: too few nodes."""
    found: dict[str, tuple[int, str]] = {}
    for report in sorted(reports, key=lambda each: each.rank):
        if report.local_rank == 0:
            found.setdefault(report.node.rpartition(" on ")[2], (report.rank, report.node))
    return list(found.values()) if len(found) >= LEAST else []


def measure(group: Any, ranks: Sequence[int], place: int) -> float:
    """Bytes per second, in each direction, between the node at ``place`` in the ring and the next one.

    ``group`` is a process group. ``ranks`` measure for the nodes of the ring, and each of them calls this.
    """
    count, speed = len(ranks), 0.0
    for turn in range(2 + count % 2):
        for link in sorted({(place - 1) % count, place}):
            if turn == (2 if count % 2 and link == count - 1 else link % 2):
                other = ranks[(place + 1) % count if link == place else link]
                found = _speed(group, other, leads=link == place)
                speed = found if link == place else speed
    return speed


def _speed(group: Any, other: int, *, leads: bool) -> float:
    _exchange(group, other, 1)  # both are there
    seconds = _exchange(group, other, _SMALLEST)
    size = torch.tensor([min(_LARGEST, max(_SMALLEST, int(_SMALLEST * _SECONDS / seconds)))])
    (group.send if leads else group.recv)([size], other, 0).wait()
    return int(size) / min(_exchange(group, other, int(size)) for _ in range(_REPEATS))


def _exchange(group: Any, other: int, size: int) -> float:
    """Seconds to send so many bytes to a rank and to receive as many from it."""
    own, theirs = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    began = time.perf_counter()
    for work in [group.recv([theirs], other, 0), group.send([own], other, 0)]:
        work.wait()
    return time.perf_counter() - began


def slow_links(nodes: Sequence[str], speeds: Sequence[float]) -> list[str]:
    """A line for each node or link that is slower than others. ``speeds`` are from each node to the next in the ring.

    A node is slow if both of its links are. What others have is the speed that a quarter of the links exceed, so that a
    slow node among three, which makes two links slow, is found.
    """
    usual = sorted(speeds, reverse=True)[len(speeds) // 4]
    slow = {link for link, speed in enumerate(speeds) if speed * _SLOW < usual}
    lines, told = [], set()
    for place, node in enumerate(nodes):
        links = {(place - 1) % len(nodes), place}
        if links <= slow:
            told |= links
            lines.append(f"the network of {node} is slow: {_text(max(speeds[link] for link in links))}")
    for link in sorted(slow - told):
        other = nodes[(link + 1) % len(nodes)]
        lines.append(f"the network between {nodes[link]} and {other} is slow: {_text(speeds[link])}")
    return [f"{line} in each direction, {_text(usual)} between others" for line in lines]


def _text(speed: float) -> str:
    return f"{speed / 1e9:.3g} GB/s"
