"""Tests of flk_runtime.parallel.gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.gradients import SameUse


def record(name: str) -> SimpleNamespace:
    trained = SimpleNamespace(requires_grad=True)
    return SimpleNamespace(_param_fqn=name, unsharded_accumulated_grad=None, sharded_param=trained)


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A unit with the parameters body and head, and the number of its reductions."""
    group = SimpleNamespace(fsdp_params=[record("body"), record("head")], reduce_grads=True, reduced=0)

    def post_backward() -> None:
        group.reduced += 1

    group.post_backward = post_backward
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    SameUse(0, group, nn.Module())
    return group


def test_a_use_that_the_ranks_have_not_compared_is_refused_between_two_comparisons(unit: Any) -> None:
    body, head = unit.fsdp_params
    for number in range(10):  # the ranks compare the first 8
        body.unsharded_accumulated_grad = torch.ones(1)
        head.unsharded_accumulated_grad = torch.ones(1) if number % 2 else None
        unit.post_backward()
    body.unsharded_accumulated_grad = None
    unit.reduce_grads = False
    unit.post_backward()  # in no_sync
    unit.reduce_grads = True
    with pytest.raises(SetupError, match="'body' has no gradient on rank 3, unlike in the passes before"):
        unit.post_backward()
    assert unit.reduced == 11


def test_parameters_that_are_unfrozen_between_two_comparisons_are_no_other_use(unit: Any) -> None:
    body, head = unit.fsdp_params
    body.sharded_param.requires_grad = False
    head.unsharded_accumulated_grad = torch.ones(1)
    for _ in range(10):
        unit.post_backward()
    body.sharded_param.requires_grad = True
    body.unsharded_accumulated_grad = torch.ones(1)
    unit.post_backward()
    assert unit.reduced == 11
