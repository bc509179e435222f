"""The network between neighbouring nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from flk_runtime.contract import pod_env
from flk_runtime.preflight.report import RankReport
from flk_runtime.run import links

NODES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("speeds", "lines"),
    [
        ([2.0, 1.0, 1.5, 2.0, 0.6], []),  # within the usual
        ([1e-3] * 5, []),  # slow everywhere
        ([2, 0.1, 2, 2, 2], ["the network between b and c is slow: 0.1 GB/s in each direction, 2 GB/s between others"]),
        ([0.3, 0.1, 2, 2, 2], ["the network of b is slow: 0.3 GB/s in each direction, 2 GB/s between others"]),
        ([0.3, 2, 2, 2, 0.1], ["the network of a is slow: 0.3 GB/s in each direction, 2 GB/s between others"]),
        (
            [0.1, 2, 0.2, 0.2, 2],
            [
                "the network of d is slow: 0.2 GB/s in each direction, 2 GB/s between others",
                "the network between a and b is slow: 0.1 GB/s in each direction, 2 GB/s between others",
            ],
        ),
    ],
)
def test_a_slow_node_or_link_is_named(speeds: list[float], lines: list[str]) -> None:
    assert links.slow_links(NODES, [each * 1e9 for each in speeds]) == lines


def test_a_slow_node_among_three_is_named() -> None:
    (line,) = links.slow_links(NODES[:3], [1e8, 2e9, 1e8])
    assert line.startswith("the network of a is slow: ")


def test_the_first_rank_of_each_node_measures() -> None:
    places = [(0, 0, "a"), (1, 1, "a"), (2, 0, "b"), (3, 1, "b"), (4, 0, "b"), (6, 0, "c"), (7, 1, "c")]
    reports = [RankReport(rank, 8, local, node=f"gpt-worker-{rank} on {node}") for rank, local, node in places]
    assert [rank for rank, _ in links.leads(list(reversed(reports)))] == [0, 2, 6]
    assert links.leads(reports[:5]) == []  # two nodes


@pytest.mark.parametrize(("value", "measured"), [("", 1), ("0", 0)])
def test_rank_0_decides_whether_an_attempt_measures(value: str, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    reports = [RankReport(rank, 3, 0, node=f"gpt-worker-{rank} on {NODES[rank]}") for rank in range(3)]
    rings: list[Sequence[int]] = []

    def measure(group: Any, ranks: Sequence[int], place: int) -> float:
        rings.append(ranks)
        return 1e9

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(links.process_group, "store", lambda: store)
    monkeypatch.setattr(links.process_group, "comm_device", lambda device: device)
    monkeypatch.setattr(links, "measure", measure)
    monkeypatch.setenv(pod_env.LINKS, value)
    for place in (1, 2):  # the other nodes
        store.set(f"links/{place}", "1e9")
    links.check((), reports)
    assert rings == [[0, 1, 2]] * measured
    assert json.loads(store.get("links")) == [[rank, report.node] for rank, report in enumerate(reports)] * measured


@pytest.mark.parametrize("count", [3, 4])
def test_each_link_is_measured_by_its_two_ends(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the link between the last and the first node of an odd number, without a node that waits for ever."""
    monkeypatch.setattr(links, "_LARGEST", links._SMALLEST)
    store = dist.HashStore()  # type: ignore[attr-defined]
    seen: Counter[tuple[int, int]] = Counter()
    exchange = links._exchange

    def noted(group: Any, other: int, size: int) -> float:
        seen[group.rank(), other] += 1
        return exchange(group, other, size)

    def measure(rank: int) -> float:
        group = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=60))  # type: ignore[attr-defined]
        return links.measure(group, range(count), rank)

    monkeypatch.setattr(links, "_exchange", noted)
    with ThreadPoolExecutor(count) as threads:
        speeds = list(threads.map(measure, range(count)))
    assert all(speed > 0 for speed in speeds)
    assert seen == {
        (rank, (rank + step) % count): 2 + links._REPEATS for rank in range(count) for step in (1, count - 1)
    }
