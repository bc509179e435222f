"""When DistributedOptimizer averages gradients, as one of several ranks whose collectives are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.distributed import optimizer as module

PASSES = 2.0  # what each gradient is divided by, as if the other rank's were 0


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(3)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., module.DistributedOptimizer]:
    def all_reduce(gradients: list[torch.Tensor | None], op: str) -> None:
        assert op == "mean"
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(PASSES)

    monkeypatch.setattr(module, "begin", lambda call: True)
    monkeypatch.setattr(module, "check_alike", lambda call, optimizer: [])
    monkeypatch.setattr(module, "all_reduce", all_reduce)
    return lambda parameters: module.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))


def passes(*parameters: nn.Parameter) -> None:
    sum((each.sum() for each in parameters), torch.zeros(())).backward()  # type: ignore[no-untyped-call]


def test_a_pass_whose_gradients_are_dropped_may_reach_a_part(make: Any, parameters: Any) -> None:
    optimizer = make(parameters)
    for _ in range(2):
        passes(parameters[0])  # as a generator's loss by the features of a discriminator
        optimizer.zero_grad()
        passes(*parameters)
        optimizer.step()
    assert [each.tolist() for each in parameters] == [[-1, -1]] * 3


def test_a_parameter_that_a_script_puts_into_a_group_itself_is_averaged(make: Any, parameters: Any) -> None:
    optimizer = make(parameters[:2])
    optimizer.param_groups[0]["params"].append(parameters[2])
    optimizer.zero_grad()
    passes(*parameters)
    optimizer.step()
    assert parameters[2].tolist() == [-0.5, -0.5]
