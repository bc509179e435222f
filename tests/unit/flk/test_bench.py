"""`flk bench` without ranks: NCCL's log, fits to measured collectives, the job, and the results that are kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flk.bench import BenchResult, bench_job, kept_results, measured
from flk.errors import UsageError
from flk.spec.job import Job
from flk_plan.bench import script
from flk_plan.bench.__main__ import joined
from flk_plan.bench.cases import first_cause
from flk_plan.bench.transport import transport, warning
from flk_plan.calibration import Calibration, Link

# Lines in the formats of NCCL's versions, with the prefix of host, process, thread and device.
LOGS = {
    "IB": [
        "node-1:71:71 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>",
        "node-1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>",
        "node-1:71:90 [0] NCCL INFO Using network IB",
    ],
    "IB (RoCE)": [
        "node-1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.7<0>",
        "node-1:71:90 [0] NCCL INFO Using network IB",
    ],
    "Socket": [
        "node-1:71:90 [0] NCCL INFO NET/IB : No device found.",
        "node-1:71:90 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>",
        "node-1:71:90 [0] NCCL INFO Using non-device net plugin version 0",
        "node-1:71:90 [0] NCCL INFO Using network Socket",
    ],
    "AWS Libfabric": [
        "node-1:71:90 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)",
        "node-1:71:90 [0] NCCL INFO Using network AWS Libfabric",
    ],
}


@pytest.mark.parametrize("expected", LOGS)
def test_the_transport_is_read_from_nccls_log(expected: str) -> None:
    assert transport(LOGS[expected]) == expected


def test_a_log_without_a_network_names_none() -> None:
    assert transport(["node-1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"]) is None


@pytest.mark.parametrize(
    ("fabric", "used", "said"),
    [
        ("infiniband", "IB", None),
        ("roce", "IB (RoCE)", None),
        ("infiniband", "IBext", None),
        ("roce", "IBext_v8", None),
        ("efa", "AWS Libfabric", None),
        ("socket", "Socket", None),
        ("auto", "IB", None),
        ("efa", None, None),
        ("efa", "Socket", "NCCL uses the network Socket, and the job's fabric is efa: use an image with aws-ofi-nccl"),
        ("infiniband", "Socket", "check that the pods have the RDMA devices"),
        ("socket", "IB", "another network is there"),
        ("auto", "Socket", "name it with --fabric"),
        ("infiniband", "AWS Libfabric", "NCCL uses the network AWS Libfabric, and the job's fabric is infiniband"),
        ("roce", "AWS Libfabric", "and NCCL_IB_GID_INDEX"),
        ("gib", "gIB", None),
        ("gib", "IB", None),
        ("tcpx", "GPUDirectTCPX_v7", None),
        ("tcpxo", "FasTrak", None),
    ],
)
def test_a_transport_other_than_the_fabrics_is_a_warning(fabric: str, used: str | None, said: str | None) -> None:
    found = warning(fabric, used)
    assert found is None if said is None else said in str(found)


def test_the_error_of_a_case_is_that_of_the_rank_that_failed_by_itself() -> None:
    broken = "exit code 1: RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711"
    other = "another rank failed"
    assert first_cause([broken, other, "exit code 1: MemoryError: no room", ""]).startswith("rank 2: exit code 1: Mem")
    assert first_cause(["", other, broken]) == f"rank 2: {broken}"
    store = "exit code 1: torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients"
    misuse = "exit code 1: torch.distributed.DistBackendError: NCCL error: ncclInvalidUsage: Duplicate GPU detected"
    assert first_cause([store, misuse]) == f"rank 1: {misuse}"


def test_a_fit_finds_latency_and_bandwidth() -> None:
    link = Link.fit([(size, 2e-3 + size * 1e-9) for size in (1 << 12, 1 << 20, 1 << 28)])
    assert link.latency == pytest.approx(2e-3, rel=1e-6)
    assert link.per_byte == pytest.approx(1e-9, rel=1e-6)
    assert Link.fit([(1000, 1e-3)]) == Link(0.0, 1e-6)


def test_a_calibration_travels_as_plain_data() -> None:
    sizes = [[1 << 12, 1e-3], [1 << 20, 2e-3]]
    given = {"compute": 2.0, "collectives": [{"kind": "all-gather", "ranks": 4, "stride": 2, "sizes": sizes}]}
    calibration = Calibration.parse(given)
    assert Calibration.parse(json.loads(json.dumps(calibration.to_dict()))) == calibration


def test_the_launch_of_a_step_is_the_shortest_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(strategy="ddp", device=torch.device("cuda"), mfu=0.5)
    monkeypatch.setattr(script.current, "training", run)
    monkeypatch.setattr(script.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(script.torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(script.dist, "barrier", lambda: None)
    # Three steps of warm-up; three that are launched and then over; and two.
    times = iter([1.0, 2.0, 3.0, 3.5, 4.0, 4.25, 5.0, 5.75, 6.0, 7.0, 8.0])
    monkeypatch.setattr(script.time, "perf_counter", lambda: next(times))
    clock = script._Clock("ddp", 2)
    for _ in range(7):
        clock.tick()
    with pytest.raises(script._Done):
        clock.tick()
    assert clock.result == {"seconds": 1.0, "queued": 0.25, "mfu": 0.5, "memory": 7}


def result(time: float = 1.0, model: str = "a", nodes: int = 2) -> BenchResult:
    data: dict[str, Any] = {
        "model": model,
        "hardware": {"gpu": "H100", "nodes": nodes, "ranks": 8, "fabric": "efa"},
        "calibration": {"compute": 1.5, "collectives": []},
        "time": time,
        "strategies": {
            "ddp": {"error": "out of memory"},
            "full_shard": {"seconds": 0.2, "mfu": 0.4, "memory": [1 << 30]},
            "hybrid_shard": {"seconds": 0.1, "mfu": 0.5, "memory": [1 << 31]},
        },
        "predicted": {"full_shard": {"step_seconds": 0.18}},
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


def with_times(alone: float, **strategies: tuple[float, float]) -> BenchResult:
    times = {name: {"seconds": seconds, "spread": spread} for name, (seconds, spread) in strategies.items()}
    return BenchResult({**result().data, "alone": {"seconds": alone, "spread": 0.0}, "strategies": times})


@pytest.mark.parametrize(
    ("measured", "noise"),
    [
        (with_times(0.1, ddp=(0.1, 0.01), full_shard=(0.2, 0.02)), ""),
        (with_times(0.01, ddp=(0.03, 0.09), full_shard=(0.11, 0.0)), "two measurements of a strategy differ by 90 ms"),
        (with_times(0.05, ddp=(0.03, 0.0), full_shard=(0.11, 0.0)), "a step without communication took longer"),
        (with_times(0.31, ddp=(0.3, 0.0), full_shard=(0.5, 0.0)), ""),
        (with_times(0.1, ddp=(0.1, 0.5)), ""),
    ],
)
def test_a_result_that_is_noise_is_not_kept(tmp_path: Path, measured: BenchResult, noise: str) -> None:
    assert measured.noise.startswith(noise)
    assert bool(measured.noise) == bool(noise)
    assert bool(measured.keep(tmp_path)) == (not noise)


def test_rounds_become_the_fastest_with_the_time_to_the_slowest() -> None:
    first = joined(None, {"seconds": 0.4, "mfu": 0.1})
    second = joined(first, {"seconds": 0.1, "mfu": 0.4})
    assert (first["spread"], second["seconds"], second["mfu"]) == (0.0, 0.1, 0.4)
    assert second["spread"] == pytest.approx(0.3)
    assert joined(second, {"seconds": 0.2})["spread"] == pytest.approx(0.3)
    assert joined(first, {"error": "out of memory"}) == {"error": "out of memory"}


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
