"""`flk bench` without ranks: the job, and the results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flk.errors import UsageError
from flk.local.bench import BenchResult, bench_job, kept_results, measured
from flk.manifest.files import select_files
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


def result(time: float = 1.0, model: str = "a", nodes: int = 2) -> BenchResult:
    data: dict[str, Any] = {
        "model": model,
        "hardware": {"gpu": "H100", "nodes": nodes, "ranks": 8, "fabric": "efa"},
        "time": time,
        "strategies": {
            "ddp": {"error": "out of memory"},
            "full_shard": {"seconds": 0.2, "mfu": 0.4, "memory": [1 << 30]},
            "hybrid_shard": {"seconds": 0.1, "mfu": 0.5, "memory": [1 << 31]},
        },
    }
    return BenchResult(data)


def test_the_result_is_found_in_the_output_of_rank_0() -> None:
    line = f"[rank 0] flk-bench {json.dumps(result().data)}"
    found = BenchResult.find(line)
    assert found == result()
    assert found
    assert found.fastest == "hybrid_shard"
    for other in ("[rank 0] flk-bench {", "[rank 1] " + line.removeprefix("[rank 0] "), "[rank 0] flk-bench 3", ""):
        assert BenchResult.find(other) is None


def test_the_newest_result_of_a_model_on_some_hardware_is_kept(tmp_path: Path) -> None:
    for time, model, nodes in ((3.0, "a", 2), (1.0, "b", 2), (2.0, "a", 4), (4.0, "a", 2)):
        assert result(time, model, nodes).keep(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    assert [each["time"] for each in kept_results(tmp_path)] == [1.0, 2.0, 4.0]
    assert kept_results(tmp_path)[-1]["seconds"] == {"full_shard": 0.2, "hybrid_shard": 0.1}
    job = Job(command="train.py", replicas=2, resources={"gpu": 8})  # type: ignore[arg-type]
    assert [each["model"] for each in measured(job, tmp_path)] == ["b", "a"]
    assert BenchResult({"strategies": {}}).keep(tmp_path) is None
    failed = BenchResult({**result(5.0).data, "strategies": {"ddp": {"error": "out of memory"}}})
    assert failed.keep(tmp_path) is None
    assert kept_results(tmp_path)[-1]["time"] == 4.0


def test_the_faster_of_two_rounds_counts_and_an_error_in_either() -> None:
    first, second, error = {"seconds": 0.4}, {"seconds": 0.1}, {"error": "out of memory"}
    assert faster({}, first) == first
    assert faster(first, second) == faster(second, first) == second
    assert faster(first, error) == error


def test_the_job_measures_in_the_same_pods_and_leaves_checkpoints_alone() -> None:
    job = Job(command="train.py --lr 1", replicas=2, strategy="auto", checkpoint="data:/x", elastic="1:2")  # type: ignore[arg-type]
    made = bench_job(job, ["FULL_SHARD", "ddp"], root=Path(), steps=5, timeout=60)
    request = {"strategies": ["full_shard", "ddp"], "steps": 5, "timeout": 60}
    assert made.command == ["-m", "flk_plan.bench", json.dumps(request), "train.py", "--lr", "1"]
    assert (made.replicas, made.checkpoint, made.elastic, made.restarts) == (2, None, None, 0)
    assert made.ship == ["train.py"]
    for name in ("zero3", "diloco", "auto", "none"):
        with pytest.raises(UsageError, match="--strategies"):
            bench_job(job, [name], root=Path(), steps=5, timeout=60)


@pytest.mark.parametrize("written", ["{}/.b/train [1].py", "./.b/train [1].py"])
def test_the_script_travels_however_its_path_is_written(tmp_path: Path, written: str) -> None:
    for name in (".b/train [1].py", ".b/train 1.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    made = bench_job(Job(command=[written.format(tmp_path)]), [], root=tmp_path, steps=5, timeout=60)
    assert made.command[3:] == [".b/train [1].py"]
    assert ".b/train [1].py" in select_files(made, tmp_path).files
