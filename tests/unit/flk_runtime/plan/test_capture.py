"""A script that is planned gets parameters without data, and everything is as before when it has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions, parallelize
from flk_runtime.plan.capture import _Session
from flk_runtime.plan.hardware import GPUS

ALONE: dict[str, Any] = {"device": torch.device("cpu"), "world_size": 1, "local_world_size": 1}


def test_modules_have_parameters_without_data_and_share_those_that_the_script_shares() -> None:
    dropout = functional.dropout
    with _Session(GPUS["h100"]).patches():
        given = nn.Parameter(torch.ones(3), requires_grad=False)
        given.note = "kept"  # type: ignore[attr-defined]
        first, second = nn.ParameterList([given]), nn.ParameterDict({"x": given})
        layer = nn.Linear(2, 2)
        assert functional.dropout is not dropout
    shared: Any = first[0]
    assert shared is second["x"]
    assert isinstance(shared, FakeTensor)
    assert (shared.shape, shared.requires_grad, shared.note) == ((3,), False, "kept")
    assert isinstance(layer.weight, FakeTensor)
    assert isinstance(layer.weight, nn.Parameter)
    assert functional.dropout is dropout
    assert not isinstance(nn.Linear(2, 2).weight, FakeTensor)


def test_parallelize_applies_nothing_in_a_script_that_is_planned() -> None:
    session = _Session(GPUS["h100"])
    with session.patches():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert parallelize(model, [optimizer], "full_shard", ParallelOptions(), **ALONE).module is model
        assert session.captured is not None
        assert session.captured.model is model
        with pytest.raises(SetupError, match="parallelizes several"):
            parallelize(model, [optimizer], "full_shard", ParallelOptions(), **ALONE)
    assert parallelize(nn.Linear(2, 2), [], "none", ParallelOptions(), **ALONE).module is not model
