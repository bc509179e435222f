"""What the plan knows of optimizers and units: temporary tensors of a step, and the units that FSDP makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flk_plan.communication import DDP_BUCKET, Cluster, collectives
from flk_plan.hardware import GPUS, find_gpu
from flk_plan.predict import Workload, predict
from flk_plan.state import OptimizerSizes, optimizer_sizes, units_of
from flk_plan.trace import OUTSIDE, Segment, StepTrace
from flk_runtime.parallel import Precision, find_blocks

H100, CPU = GPUS["h100"], find_gpu("cpu", 1 << 30)
SMALL = 64 * 32 * 4  # bytes of the parameters


class OneByOne(torch.optim.Optimizer):
    """An optimizer without foreach kernels, with two temporary copies of the parameter that it updates."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] + 1)


def sizes(make: Callable[[Any], torch.optim.Optimizer], gpu: Any = H100) -> OptimizerSizes:
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = [nn.Linear(32, 64, bias=False), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)]
    return optimizer_sizes(make([each.weight for each in layers]), gpu)


@pytest.mark.parametrize(
    ("make", "of_all", "of_largest"),
    [
        (torch.optim.AdamW, 1.0, 0.0),  # foreach keeps the roots of all second moments
        (
            lambda parameters: torch.optim.Adam(parameters, weight_decay=0.1),
            1.0,
            0.0,
        ),  # and before it the decayed gradients
        (
            lambda parameters: torch.optim.AdamW(parameters, foreach=False),
            0.0,
            2.5,
        ),  # the root and its quotient, and the quotient of the parameter before
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), 0.0, 0.0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 0.0, 0.0),
        (OneByOne, 0.0, 2.0),
    ],
)
def test_temporary_tensors_of_an_optimizer(make: Any, of_all: float, of_largest: float) -> None:
    found = sizes(make)
    assert (found.of_all, found.of_largest) == pytest.approx((of_all, of_largest), abs=0.01)


@pytest.mark.parametrize(
    ("kind", "kept"), [("Adagrad", 1.0), ("Adafactor", 2 / 64), ("ASGD", 1.0), ("NAdam", 2.0), ("Adadelta", 2.0)]
)
def test_sizes_of_an_optimizer_that_reads_the_number_of_its_step(kind: str, kept: float) -> None:
    """``kept``: elements of the state for each element of a parameter of 64 x 64."""
    *_, state = sizes(getattr(torch.optim, kind)).states.values()
    assert sum(elements for elements, _ in state) == pytest.approx(kept * 64 * 64, rel=0.05)


def test_a_cpu_has_no_foreach_kernels_by_default() -> None:
    assert sizes(torch.optim.AdamW, CPU).of_all == 0


def test_memory_has_the_temporary_tensors_of_the_optimizer() -> None:
    """AdamW under ddp needs 24 bytes for each parameter, 4 of them in buckets, and not 20."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Linear(1 << 10, 1 << 10, bias=False)
    adamw = optimizer_sizes(torch.optim.AdamW(model.parameters()), H100)
    work = Workload(
        units_of(model, [], adamw.states),
        StepTrace((Segment(OUTSIDE, backward=False, peak=1),)),
        torch.float32,
        "",
        False,
        optimizers=[adamw],
    )
    for optimizers, size in (([adamw], 24), ([], 20)):
        live = predict("ddp", replace(work, optimizers=optimizers), Cluster(1, 8, H100, 1e9)).live
        assert live == pytest.approx(size << 20, rel=1e-4)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.head = nn.Linear(8, 100)


def test_units_are_those_that_fsdp_makes() -> None:
    model = Words()
    blocks = find_blocks(model, None)
    apart = units_of(model, blocks, {})  # the embedding and the head are larger than a block
    assert [(unit.block, unit.is_kept) for unit in apart] == [(-1, False), (0, False), (1, False), (-1, True)]
    again = [each for each in collectives("full_shard", apart, 4, 4) if each.when.name == "BACKWARD"]
    assert [each.unit for each in again] == apart[:3]  # the head is there
    plain = units_of(model, blocks, {}, ends=False)
    assert [unit.block for unit in plain] == [-1, 0, 1]
    mixed = units_of(model, blocks, {}, Precision(), ends=False)  # batch norms compute in float32, and are units
    assert sorted(unit.block for unit in mixed) == [-1, 0, 0, 1, 1]
    assert len({sum(each.numel for unit in units for each in unit.parameters) for units in (mixed, plain)}) == 1
    gathered = [each for each in collectives("full_shard", mixed, 4, 4) if each.when.name == "FORWARD"]
    assert [each.unit.block == -1 for each in gathered if each.unit] == [True, False, False, False, False]


def test_buckets_of_ddp_end_with_the_parameters_that_are_registered_first() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Words()
        model.embedding = nn.Embedding(DDP_BUCKET // 8, 8)
    sent = list(collectives("ddp", units_of(model, find_blocks(model, None), {}), 4, 1))
    assert [each.full_bytes > DDP_BUCKET for each in sent] == [True]
    model.head = nn.Linear(8, 100 + DDP_BUCKET // 8, device="meta")
    sent = list(collectives("ddp", units_of(model, find_blocks(model, None), {}), 4, 1))
    assert [int(each.full_bytes // DDP_BUCKET) for each in sent] == [4, 4]
