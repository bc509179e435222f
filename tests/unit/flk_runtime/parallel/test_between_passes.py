"""The attributes of parameters between two passes: whose they are, and how often the classes change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flk_runtime.parallel.between_passes import BetweenPasses


@pytest.fixture
def between() -> Iterator[BetweenPasses]:
    """One that knows a model, and leaves the classes as they were."""
    kinds = (nn.Parameter, DTensor)
    before = [dict(vars(kind)) for kind in kinds]
    found, model = BetweenPasses(), nn.Linear(2, 2)
    found.watch(model)
    yield found
    for kind, attributes in zip(kinds, before, strict=True):
        for name in found._attributes:
            delattr(kind, name) if name not in attributes else setattr(kind, name, attributes[name])


def test_steps_change_no_class(between: BetweenPasses) -> None:
    """Python 3.13 no longer caches the attributes of a class that has changed a thousand times."""
    before = [dict(vars(kind)) for kind in (nn.Parameter, DTensor)]
    for change in (between.begin, between.end, between.begin, between.end):
        change()
        assert [dict(vars(kind)) for kind in (nn.Parameter, DTensor)] == before


def test_other_parameters_are_as_in_torch_at_any_time(between: BetweenPasses) -> None:
    parameter = nn.Parameter(torch.ones(2))
    for active in (False, True):
        if active:
            between.begin()
        (parameter * 3).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [3, 3]
        parameter.grad = torch.zeros(2)
        assert parameter.grad.tolist() == [0, 0]
        del parameter.grad
        assert parameter.grad is None
        assert parameter.requires_grad_(False) is parameter
        assert not parameter.requires_grad
        parameter.requires_grad = True
        assert parameter.requires_grad
