"""What strategy auto chooses: by predictions, by measured results, and within the options of the script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flk_plan.capture import CapturedModel
from flk_plan.choice import choose
from flk_plan.communication import Cluster
from flk_plan.hardware import find_gpu, gpu_of_type
from flk_plan.plan import hardware_of, identity
from flk_plan.trace import Tracer
from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions
from flk_runtime.system import mfu

GIB = 1 << 30
H100 = find_gpu("NVIDIA H100 80GB HBM3", 80 * GIB)


def captured(options: ParallelOptions | None = None, beside: Any = None) -> CapturedModel:
    """A model of four blocks with 8.4 million parameters each, after its first step."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        if beside:
            blocks[0][0].beside = beside()  # which nothing calls
        x = torch.zeros(4096, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    tracer = Tracer(model, blocks, H100)
    with mode, tracer.recording():
        model(x).square().mean().backward()
    return CapturedModel(model, [optimizer], options or ParallelOptions(), list(blocks), tracer.result())


def on(nodes: int, ranks: int, memory: int = 80 * GIB) -> Cluster:
    return Cluster(nodes, ranks, find_gpu("NVIDIA H100 80GB HBM3", memory), 50e9, "infiniband")


def result(model: CapturedModel, cluster: Cluster, **seconds: float) -> dict[str, Any]:
    return {**identity(model, cluster), "seconds": seconds}


def test_a_model_that_fits_is_replicated() -> None:
    chosen = choose(captured(), on(1, 8), [])
    assert chosen["strategy"] == "ddp"
    assert "(predicted), shard_grad_op" in chosen["reason"]


def test_a_model_that_does_not_fit_is_sharded() -> None:
    # Parameters, gradients and AdamW's moments take 512 MiB on each rank, or an eighth of that.
    chosen = choose(captured(), on(1, 8, memory=int(2.6 * GIB)), [])
    assert chosen["strategy"] in ("shard_grad_op", "full_shard")
    assert "ddp does not fit (1." in chosen["reason"]


def test_where_nothing_fits_it_is_what_needs_least() -> None:
    chosen = choose(captured(), on(2, 8, memory=GIB), [])
    assert chosen["strategy"] == "full_shard"
    assert "it needs least memory" in chosen["reason"]


@pytest.mark.promise("Planning: Strategy auto chooses by the plan, and keeps its choice")
def test_measured_steps_of_the_same_model_and_hardware_win() -> None:
    model, cluster = captured(), on(1, 8)
    assert identity(captured(), cluster) == identity(model, cluster)
    measured = [
        result(model, cluster, ddp=0.3, full_shard=0.1),
        result(model, cluster, ddp=0.3, full_shard=0.2),  # newer
        result(model, on(2, 8), ddp=0.1, full_shard=0.3),
    ]
    chosen = choose(model, cluster, measured)
    assert chosen == {"strategy": "full_shard", "reason": "200 ms for a step (measured by flk bench), ddp 300 ms"}
    assert choose(captured(ParallelOptions(recompute=True)), cluster, measured)["strategy"] == "ddp"
    assert choose(captured(), on(1, 4), measured)["strategy"] == "ddp"


def test_a_result_is_of_gpus_with_as_much_memory() -> None:
    model = captured()
    small, large = (
        Cluster(1, 8, find_gpu(f"NVIDIA A100-SXM4-{gib}GB", gib * GIB - 10**9), 50e9, "infiniband") for gib in (40, 80)
    )
    assert hardware_of(small) != hardware_of(large)
    assert hardware_of(large) == hardware_of(replace(large, gpu=gpu_of_type("a100")))
    measured = [result(model, large, ddp=0.3, full_shard=0.1)]
    assert choose(model, large, measured)["strategy"] == "full_shard"
    assert "predicted" in choose(model, small, measured)["reason"]


def test_a_result_is_of_the_same_model_whatever_names_its_blocks() -> None:
    def of(*blocks: Any, **options: Any) -> dict[str, Any]:
        return identity(captured(ParallelOptions(blocks=blocks, **options)), on(1, 8))

    assert of(nn.Sequential) == of("Sequential")
    assert of(nn.Sequential, recompute=True) != of(nn.Sequential)


def test_of_two_that_are_as_fast_it_is_what_communicates_less() -> None:
    """Measured times differ by more than predicted ones."""
    model, cluster = captured(), on(1, 8)
    assert choose(model, cluster, [result(model, cluster, ddp=0.2, full_shard=0.192)])["strategy"] == "ddp"
    assert choose(model, cluster, [result(model, cluster, ddp=0.2, full_shard=0.188)])["strategy"] == "full_shard"


@pytest.mark.promise("Planning: Strategy auto chooses by the plan, and keeps its choice")
@pytest.mark.parametrize(
    "beside",
    [lambda: nn.Parameter(torch.tensor(1.0)), lambda: nn.Embedding(4, 2, sparse=True)],
    ids=["scalar", "sparse"],
)
def test_the_model_limits_the_choice(beside: Any) -> None:
    assert choose(captured(beside=beside), on(1, 8, memory=2 * GIB), [])["strategy"] == "ddp"


@pytest.mark.parametrize(
    ("device", "gib", "name", "link"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "A100", 300e9),
        ("NVIDIA H100 NVL", 94, "H100 NVL", 300e9),
        ("NVIDIA H200", 141, "H200", 450e9),
        ("NVIDIA H200 NVL", 141, "H200 NVL", 450e9),
        ("NVIDIA A100-PCIE-40GB", 40, "A100 PCIe", 32e9),
        ("Tesla V100-SXM2-16GB", 16, "V100", 150e9),
        ("Tesla V100-PCIE-32GB", 32, "V100 PCIe", 16e9),
        ("Tesla T4", 15, "T4", 16e9),
        ("NVIDIA L4", 23, "L4", 32e9),
        ("NVIDIA A10G", 23, "A10G", 32e9),
        ("AMD Instinct MI300X", 192, "MI300X", 448e9),
    ],
)
def test_devices_are_found_by_their_names(device: str, gib: int, name: str, link: float) -> None:
    gpu = find_gpu(device, gib * GIB)
    assert (gpu.name, gpu.memory, gpu.link) == (name, gib * GIB, link)
    assert gpu.peak(torch.float16) == mfu.peak(device, torch.float16)
    assert gpu.peak(torch.float32) > 8e12


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"])
def test_an_unknown_gpu_is_refused_unless_flk_bench_has_measured_it(device: str) -> None:
    cluster = Cluster(1, 8, find_gpu(device, 24 * GIB), 50e9)
    model = captured()
    with pytest.raises(SetupError, match=f"there are no figures for a {device}, only for t4, .*mi300x"):
        choose(model, cluster, [])
    assert choose(model, cluster, [result(model, cluster, ddp=0.3, full_shard=0.1)])["strategy"] == "full_shard"
    assert hardware_of(cluster)["gpu"] == device


def test_a_dtype_that_a_gpu_cannot_multiply_has_no_peak() -> None:
    with pytest.raises(SetupError, match="no figure for matrix products in float64 on GPUs of type H100"):
        H100.peak(torch.float64)
