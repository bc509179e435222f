"""What the plan assumes of GPUs: their figures, and the pools of memory that CUDA's allocator keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flk_plan.communication import Cluster, collectives
from flk_plan.hardware import FRAGMENTATION, GPUS, LAUNCH_SECONDS, find_gpu
from flk_plan.predict import Prediction, Workload, predict
from flk_plan.state import Parameter, Unit
from flk_plan.trace import LOSS, OUTSIDE, Segment, StepTrace

RANKS = 8
ROOT, BLOCK = 1000 * RANKS, 100 * RANKS  # elements


def workload(seconds: float = 0.0) -> Workload:
    """A model of two blocks and an embedding, in float32, whose activations take most at the loss.

    Each part of the step takes ``seconds``.
    """

    def unit(block: int, numel: int) -> Unit:
        parameter = Parameter((numel,), 4, trained=True, state=((numel, 4), (numel, 4)))
        return Unit(block, (parameter,), is_kept=block == OUTSIDE)

    segments = [
        Segment(OUTSIDE, backward=False, peak=0, seconds=seconds),
        Segment(0, backward=False, peak=2_000, seconds=seconds),
        Segment(1, backward=False, peak=4_000, seconds=seconds),
        Segment(LOSS, backward=False, peak=90_000, seconds=seconds),
        Segment(1, backward=True, peak=4_000, seconds=seconds),
        Segment(0, backward=True, peak=2_000, seconds=seconds),
    ]
    return Workload(
        [unit(OUTSIDE, ROOT), unit(0, BLOCK), unit(1, BLOCK)],
        StepTrace(tuple(segments)),
        torch.float32,
    )


def predicted(strategy: str, device: str, ranks: int = RANKS) -> Prediction:
    gpu = GPUS["h100"] if device == "cuda" else find_gpu("cpu", 1 << 30)
    return predict(strategy, workload(), Cluster(1, ranks, gpu, 1e9))


# Bytes beside parameters and optimizer state. At the loss, the embedding and the last block are there in full.
AT_LOSS = 90_000 + 4 * (ROOT + BLOCK)
GRADIENTS = 4 * (ROOT + 2 * BLOCK) // RANKS


@pytest.mark.parametrize(
    ("device", "needed"),
    [
        # Two outputs of all-gathers lie in a pool of their own, and the gradients in another one.
        ("cuda", AT_LOSS + 4 * (ROOT + BLOCK) + GRADIENTS),
        ("cpu", AT_LOSS),
    ],
)
def test_each_stream_keeps_its_memory(device: str, needed: int) -> None:
    found = predicted("full_shard", device)
    held = found.state.parameters + found.state.optimizer
    assert found.live == held + AT_LOSS
    assert found.total == int((held + needed) / (1 - FRAGMENTATION))


def test_ddp_has_one_pool() -> None:
    found = predicted("ddp", "cuda")
    assert found.total == int(found.live / (1 - FRAGMENTATION))


@pytest.mark.parametrize(("strategy", "shards"), [("full_shard", RANKS), ("hybrid_shard", RANKS // 2)])
def test_no_computation_hides_what_is_sent_of_the_root(strategy: str, shards: int) -> None:
    """It is gathered first and reduced last: under hybrid strategies in a shard group, and then between the groups."""
    gpu = replace(GPUS["h100"], bandwidth=1e30, link=1e30)  # only the network between nodes takes time
    cluster = Cluster(2, RANKS // 2, gpu, 1.0)
    work = workload(seconds=1e9)
    sent = list(collectives(strategy, work.units, RANKS, shards))
    of_root = sum(each.seconds(cluster) for each in sent if each.unit and each.unit.block == OUTSIDE)
    found = predict(strategy, work, cluster)
    assert of_root > 1
    assert found.exposed_seconds == pytest.approx(of_root)


def test_the_host_launches_an_operation_for_each_parameter_that_fsdp_gathers_or_reduces() -> None:
    """Else a small model, for which the host is too slow, would look faster sharded than it is."""
    work = workload()
    parts = (Parameter((1,), 4, trained=True, state=()),) * 10
    more = replace(work, units=[replace(unit, parameters=unit.parameters + parts) for unit in work.units])
    cluster = Cluster(1, RANKS, replace(GPUS["h100"], bandwidth=1e30, link=1e30), 1e30)
    longer = {
        name: predict(name, more, cluster).exposed_seconds - predict(name, work, cluster).exposed_seconds
        for name in ("ddp", "shard_grad_op")
    }
    assert longer["shard_grad_op"] == pytest.approx(3 * 10 * 2 * LAUNCH_SECONDS)
    assert longer["ddp"] == pytest.approx(0)
