from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk_runtime import preflight
from flk_runtime.check import must_launch_ranks, summary
from flk_runtime.preflight import RankReport, report

NCCL = "cpu:gloo,cuda:nccl"


def world(nodes: int = 2, size: int = 2, **fields: Any) -> list[RankReport]:
    """The reports of ``nodes`` × ``size`` ranks without a fault. ``fields`` may be functions of the rank."""
    return [
        RankReport(
            **{
                "rank": rank, "world_size": nodes * size, "local_world_size": size, "node": f"n{rank // size}",
                "pid": 100 + rank, "torch": "2.13.0", "flk": "0.1.0", "code": "train.py abc", "backend": "gloo",
                "strategy": "ddp",
            }
            | {name: value(rank) if callable(value) else value for name, value in fields.items()}
        )
        for rank in range(nodes * size)
    ]  # fmt: skip


def changed(ranks: list[RankReport], rank: int, **fields: Any) -> list[RankReport]:
    return [replace(one, **fields) if one.rank == rank else one for one in ranks]


@pytest.mark.parametrize(("nodes", "size"), [(1, 1), (2, 2), (4096, 1)])
def test_ranks_without_a_fault(nodes: int, size: int) -> None:
    ranks = world(nodes, size)
    assert (preflight.compare(ranks), preflight.missing(ranks)) == ([], "")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [*world(), *world()[3:]],
            ["rank 3 joined twice: process 103 on node n1 and process 103 on node n1; give every process a rank"],
        ),
        (
            changed(world(), 2, world_size=8),
            ["2 world sizes: 4 on ranks 0-1 on node n0, rank 3 on node n1, 8 on rank 2 on node n1; start every node"],
        ),
        (
            changed(world(), 3, torch="2.12.1"),
            ["2 versions of torch: 2.13.0 on ranks 0-1 on node n0, rank 2 on node n1, 2.12.1 on rank 3 on node n1"],
        ),
        (changed(world(), 0, flk="0.2.0"), ["2 versions of flk_runtime: 0.2.0 on rank 0 on node n0, 0.1.0 on rank 1"]),
        (
            changed(world(), 1, code=""),
            ["2 versions of the code: train.py abc on rank 0 on node n0, ranks 2-3 on node n1, none on"],
        ),
        (changed(world(), 1, backend=NCCL), ["2 backends: gloo on rank 0 on node n0, ranks 2-3"]),
        (changed(world(), 1, strategy="none"), ["2 strategies: ddp on rank 0"]),
        (
            changed(world(), 1, seed=3),
            ["2 seeds: 0 on rank 0 on node n0, ranks 2-3 on node n1, 3 on rank 1 on node n0"],
        ),
    ],
)
def test_a_fault_is_one_sentence_with_rank_node_and_cure(ranks: list[RankReport], words: list[str]) -> None:
    faults = preflight.compare(ranks)
    assert [fault[: len(word)] for fault, word in zip(faults, words, strict=True)] == words


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (world()[:3], "rank 3 of 4 (on node 1, numbered from 0)"),
        (world(1, 4)[1:], "rank 0 of 4"),
        (world(4, 1)[::2], "ranks 1, 3 of 4 (on nodes 1, 3, numbered from 0)"),
    ],
)
def test_missing_ranks_are_named(ranks: list[RankReport], words: str) -> None:
    assert preflight.missing(ranks) == words


def test_sentences_stay_short_however_many_ranks_there_are() -> None:
    ranks = world(1000, 8, torch=lambda rank: f"2.{rank % 3}")
    faults = preflight.compare([one for one in ranks if one.rank % 7] * 2)
    assert len(faults) < 15
    assert max(map(len, faults)) < 700
    (versions,) = [fault for fault in faults if "versions of torch" in fault]
    assert versions.startswith("3 versions of torch: 2.1 on ranks 1, 4 on node n0, ranks 10, 13 on node n1,")
    assert "more nodes" in versions
    absent = preflight.missing([one for one in ranks if one.rank % 7])
    assert absent.startswith("ranks 0, 7, 14, 21, 28, 35, 42, 49 and 1135 more of 8000")
    assert len(absent) < 300


def test_the_version_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    monkeypatch.setattr("__main__.__file__", str(script), raising=False)
    assert report.code_version() == ""
    script.write_text("lr = 0.1")
    assert report.code_version() == f"train.py {hashlib.sha256(b'lr = 0.1').hexdigest()[:12]}"
    monkeypatch.setenv("FLK_CODE_HASH", "0123456789abcdef" * 4)
    assert report.code_version() == "archive 0123456789ab"


def test_the_name_of_a_node() -> None:
    assert report.node_name({"FLK_POD_NAME": "gpt-worker-1", "FLK_NODE_NAME": "gke-7"}) == "gpt-worker-1 on gke-7"
    assert report.node_name({"FLK_POD_NAME": "a", "FLK_NODE_NAME": "a"}) == "a"
    assert report.node_name({})


def test_summary_of_the_check() -> None:
    lines = summary(world(1000, 8, device="cuda:0"), 1.25, 0.5)
    assert lines[0] == "ranks     8000 on 1000 nodes, launcher: "
    assert lines[3] == "node      n0: 8 ranks from rank 0, cuda:0"
    assert lines[-3:] == [
        "node      n999: 8 ranks from rank 7992, cuda:0",
        "start     1.250 s to open the process group, 0.500 s for the first all-reduce",
        "ok",
    ]


def test_check_starts_ranks_in_a_pod_and_not_in_a_rank() -> None:
    assert must_launch_ranks({"FLK_PODS": "2", "FLK_RDZV_ENDPOINT": "a:1"})
    assert not must_launch_ranks({"FLK_PODS": "2", "FLK_ATTEMPT": "0"})
    assert not must_launch_ranks({"RANK": "0"})
