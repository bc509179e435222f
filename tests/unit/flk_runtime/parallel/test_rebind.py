"""Optimizers that cannot take the parameters of a strategy, or hold those that it has replaced, are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from flk_runtime.errors import SetupError
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.rebind import rebind_optimizers


class Slow(torch.optim.SGD):
    """As Lookahead of pytorch_optimizer: it has a state from the start, which it gives in a form of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for each in self.param_groups[0]["params"]:
            self.state[each]["slow"] = each.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"slow_state": dict(enumerate(self.state.values()))}


def test_an_optimizer_whose_state_has_a_form_of_its_own_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = Slow(model.parameters())
    with pytest.raises(SetupError, match=r"cannot shard the state of Slow, whose state_dict\(\) has no 'state'"):
        rebind_optimizers([optimizer], model, lambda: ParallelModel(model), strict=True)


def replace(model: nn.Linear) -> ParallelModel:
    """Give ``model`` another weight, as a strategy that shards does."""
    model.weight = nn.Parameter(model.weight.detach().clone())
    return ParallelModel(model)


def test_the_step_of_an_optimizer_of_replaced_parameters_is_refused() -> None:
    model = nn.Linear(3, 2)
    passed, left = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    stale = torch.optim.SGD([model.weight], lr=0.1)
    stale.step()
    rebind_optimizers([passed], model, lambda: replace(model), strict=True)
    for each in (stale, left):
        with pytest.raises(SetupError, match="SGD holds the parameter 'weight' that parallelize has replaced"):
            each.step()
    passed.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_model_with_parameters_of_another_class_can_be_moved() -> None:
    model = nn.Linear(2, 2)
    model.base = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False)
    parallel = rebind_optimizers([], model, lambda: ParallelModel(model.to("cpu")), strict=True)
    assert type(parallel.parameters()["base"]) is TwoTensor
