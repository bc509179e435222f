"""What the plan assumes of GPUs: a limit of their power, and the pools of memory that CUDA's allocator keeps."""

from __future__ import annotations

import pytest
import torch

from flk_runtime.errors import SetupError
from flk_runtime.plan.communication import Cluster
from flk_runtime.plan.hardware import FRAGMENTATION, GPUS, find_gpu
from flk_runtime.plan.predict import Prediction, Workload, predict
from flk_runtime.plan.state import Parameter, Unit
from flk_runtime.plan.trace import LOSS, OUTSIDE, Segment, StepTrace

RANKS = 8
ROOT, BLOCK = 1000 * RANKS, 100 * RANKS  # elements


def seconds(gpu_power: float | None, flops: int, size: int) -> float:
    gpu = GPUS["h100"] if gpu_power is None else GPUS["h100"].limited(gpu_power)
    return gpu.seconds(flops, size, torch.bfloat16, attention=False)


def test_half_of_the_power_gives_four_fifths_of_the_frequency() -> None:
    computes, moves = (10**15, 0), (0, 10**12)
    assert seconds(350, *computes) == pytest.approx(seconds(None, *computes) * 2 ** (1 / 3), rel=1e-4)
    assert seconds(350, *moves) == seconds(None, *moves), "the memory keeps its frequency"
    assert seconds(700, *computes) == seconds(None, *computes)


@pytest.mark.parametrize("gpu_power", [0, -1, 700.5])
def test_a_limit_that_no_gpu_has(gpu_power: float) -> None:
    with pytest.raises(SetupError, match=r"expected more than 0 and at most 700"):
        GPUS["h100"].limited(gpu_power)


def test_a_gpu_without_a_figure_for_its_power() -> None:
    with pytest.raises(SetupError, match=r"no figure for the power of B300"):
        GPUS["b300"].limited(500)


def predicted(strategy: str, api: str, device: str) -> Prediction:
    """A model of two blocks and an embedding, in float32, with a trace whose activations take most at the loss."""

    def unit(block: int, numel: int) -> Unit:
        return Unit(block, (Parameter((numel,), 4, trained=True, state=((numel, 4), (numel, 4))),))

    segments = [
        Segment(OUTSIDE, backward=False, peak=0),
        Segment(0, backward=False, peak=2_000),
        Segment(1, backward=False, peak=4_000),
        Segment(LOSS, backward=False, peak=90_000),
        Segment(1, backward=True, peak=4_000),
        Segment(0, backward=True, peak=2_000),
    ]
    gpu = GPUS["h100"] if device == "cuda" else find_gpu("cpu", 1 << 30)
    work = Workload(
        [unit(0, BLOCK), unit(1, BLOCK), unit(OUTSIDE, ROOT)],
        StepTrace(tuple(segments)),
        torch.float32,
        "as written",
        recompute=False,
    )
    return predict(strategy, work, Cluster(1, RANKS, gpu, 1e9), api=api)


# Bytes beside parameters and optimizer state. At the loss, the embedding and the last block are there in full.
AT_LOSS = 90_000 + 4 * (ROOT + BLOCK)
GRADIENTS = 4 * (ROOT + 2 * BLOCK) // RANKS


@pytest.mark.parametrize(
    ("api", "device", "needed"),
    [
        # Two outputs of all-gathers lie in a pool of their own, and the gradients in another one.
        ("fsdp2", "cuda", AT_LOSS + 4 * (ROOT + BLOCK) + GRADIENTS),
        # What is gathered lies in a pool: the embedding, a block and the next one. The rest is as above.
        ("fsdp1", "cuda", 90_000 + 4 * (ROOT + 2 * BLOCK) + GRADIENTS),
        ("fsdp2", "cpu", AT_LOSS),
    ],
)
def test_each_stream_keeps_its_memory(api: str, device: str, needed: int) -> None:
    found = predicted("full_shard", api, device)
    held = found.state.parameters + found.state.optimizer
    assert found.live == held + AT_LOSS
    assert found.total == int((held + needed) / (1 - FRAGMENTATION))


def test_ddp_has_one_pool() -> None:
    found = predicted("ddp", "ddp", "cuda")
    assert found.total == int(found.live / (1 - FRAGMENTATION))
