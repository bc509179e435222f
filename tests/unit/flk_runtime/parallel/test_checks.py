"""What torch would refuse in the middle of a step is refused by name before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions
from flk_runtime.parallel.checks import check_shardable


def empty(trained: bool = True) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=trained)
    return layer


def scalar(trained: bool = True) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.tensor(1.0), requires_grad=trained)
    return layer


def sparse(trained: bool = True) -> nn.Module:
    layer = nn.EmbeddingBag(3, 2, sparse=True)
    layer.weight.requires_grad_(trained)
    return layer


def masked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    return layer


def reduced() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (empty, "'x.nothing' has no elements, which strategy full_shard cannot shard"),
        (scalar, "'x.scale' is a scalar without rows, which strategy full_shard cannot shard: make it a vector"),
        (lambda: scalar(trained=False), r"'x\.scale' is a scalar"),
        (sparse, "'x' has sparse gradients, which strategy full_shard cannot reduce"),
        (masked, "'x.weight' has a hook for its gradient, which strategy full_shard would drop"),
        (reduced, "'x.bias' has a hook for its gradient, which strategy full_shard would drop"),
        (
            lambda: nn.Linear(2, 2).bfloat16(),
            "a ModuleDict has 'x.bias' of torch.bfloat16 and 'y.bias' of torch.float32, and strategy full_shard shards",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        check_shardable(
            nn.ModuleDict({"x": make(), "y": nn.Linear(2, 2)}), [], ParallelOptions(), "strategy full_shard"
        )


@pytest.mark.parametrize("make", [empty, sparse])
def test_what_is_frozen_has_no_gradient_to_reduce_and_units_may_differ_in_dtype(
    make: Callable[[bool], nn.Module],
) -> None:
    check_shardable(
        nn.Sequential(make(False), nn.Linear(2, 2), low := nn.Linear(2, 2).half()),
        [low],
        ParallelOptions(),
        "precision=",
    )
