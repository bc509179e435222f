"""`flk bench` without ranks: the job, and its result."""

from __future__ import annotations

import json

import pytest

from flk.errors import UsageError
from flk.local.bench import BenchResult, bench_job
from flk.spec.job import Job
from flk_plan.bench.__main__ import faster
from flk_plan.bench.cases import first_cause


def test_the_error_of_a_case_is_that_of_the_rank_that_failed_by_itself() -> None:
    broken = "exit code 1: RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"
    other = "another rank failed"
    assert first_cause([broken, other, "exit code 1: MemoryError: no room", ""]).startswith("rank 2: exit code 1: Mem")
    assert first_cause(["", other, broken]) == f"rank 2: {broken}"
    store = "exit code 1: torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients"
    misuse = "exit code 1: torch.distributed.DistBackendError: NCCL error: ncclInvalidUsage: Duplicate GPU detected"
    assert first_cause([store, misuse]) == f"rank 1: {misuse}"


RESULT = BenchResult(
    {
        "strategies": {
            "ddp": {"error": "out of memory"},
            "full_shard": {"seconds": 0.2, "mfu": 0.4, "memory": [1 << 30]},
            "hybrid_shard": {"seconds": 0.1, "mfu": 0.5, "memory": [1 << 31]},
        }
    }
)


def test_the_result_is_found_in_the_output_of_rank_0() -> None:
    line = f"[rank 0] flk-bench {json.dumps(RESULT.data)}"
    found = BenchResult.find(line)
    assert found == RESULT
    assert found
    assert found.fastest == "hybrid_shard"
    for other in ("[rank 0] flk-bench {", "[rank 1] " + line.removeprefix("[rank 0] "), "[rank 0] flk-bench 3", ""):
        assert BenchResult.find(other) is None


def test_the_faster_of_two_rounds_counts_and_an_error_in_either() -> None:
    first, second, error = {"seconds": 0.4}, {"seconds": 0.1}, {"error": "out of memory"}
    assert faster({}, first) == first
    assert faster(first, second) == faster(second, first) == second
    assert faster(first, error) == error


def test_the_job_measures_in_the_same_pods_and_leaves_checkpoints_alone() -> None:
    job = Job(command="train.py --lr 1", replicas=2, strategy="auto", checkpoint="data:/x", elastic="1:2")  # type: ignore[arg-type]
    made = bench_job(job, ["FULL_SHARD", "ddp"], steps=5, timeout=60)
    request = {"strategies": ["full_shard", "ddp"], "steps": 5, "timeout": 60}
    assert made.command == ["-m", "flk_plan.bench", json.dumps(request), "train.py", "--lr", "1"]
    assert (made.replicas, made.checkpoint, made.elastic, made.restarts) == (2, None, None, 0)
    assert made.ship == ["train.py"]
    for name in ("zero3", "diloco", "auto", "none"):
        with pytest.raises(UsageError, match="--strategies"):
            bench_job(job, [name], steps=5, timeout=60)
