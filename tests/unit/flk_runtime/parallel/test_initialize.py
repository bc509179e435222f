"""A model on the meta device is initialized by what the script names, and refused where it names nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel import ParallelOptions, parallelize

ALONE: dict[str, Any] = {"device": torch.device("cpu"), "world_size": 1, "local_world_size": 1}


class Model(nn.Module):
    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        change(self)


def normal_data(model: Any) -> None:
    model.head.weight.data.normal_(0, 0.02)


def replaced_and_set(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.empty(7, 4))
    model.head.weight.data.normal_(0, 0.02)


def replaced(model: Any) -> None:
    model.embedding.weight = nn.Parameter(torch.randn(7, 4) * 0.02)


def replaced_data(model: Any) -> None:
    model.embedding.weight.data = torch.randn(7, 4) * 0.02


def tied(model: Any) -> None:
    nn.init.normal_(model.embedding.weight, std=0.02)
    model.head.weight = model.embedding.weight


CHANGES = (normal_data, replaced_and_set, replaced, replaced_data, tied, lambda model: None)


@pytest.mark.parametrize("change", CHANGES)
def test_without_an_initializer_a_model_on_meta_is_refused_whatever_its_constructor_does(
    change: Callable[[nn.Module], object],
) -> None:
    with torch.device("meta"):
        model = Model(change)
    with pytest.raises(SetupError, match=r"on the meta device, .*: pass init="):
        parallelize(model, [], "ddp", ParallelOptions(), **ALONE)


def test_the_resets_of_the_modules_are_named_as_the_initializer() -> None:
    torch.manual_seed(1)
    expected = Model(lambda model: None).state_dict()
    with torch.device("meta"):
        model = Model(lambda model: None)
    torch.manual_seed(1)
    parallelize(model, [], "ddp", ParallelOptions(init="reset_parameters"), **ALONE)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
