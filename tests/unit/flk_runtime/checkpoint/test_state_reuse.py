"""States that are used again for the next save: they follow every change of the object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import ModuleState, OptimizerState
from flk_runtime.checkpoint.state import Chunk


def values(chunks: list[Chunk]) -> dict[str, Any]:
    return {chunk.name: chunk.tensor.clone() for chunk in chunks}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.BatchNorm1d(2))


class Doubled(Model):
    """A model whose state_dict does not consist of its own tensors."""

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {name: value * 2 for name, value in super().state_dict(*arguments, **options).items()}


class WithExtra(Model):
    """A model with a state that is no tensor."""

    steps = 0

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


@pytest.mark.parametrize(("kind", "again"), [(Model, True), (Doubled, False), (WithExtra, True)])
def test_the_pieces_of_a_module_are_used_again_if_they_are_its_own_tensors(kind: type[Model], again: bool) -> None:
    model = kind()
    state = ModuleState(model)
    first = state.save_state("model")
    with torch.no_grad():
        model[0].weight += 1
    model.steps = 7
    found = state.save_state("model")
    fresh = ModuleState(model).save_state("model")
    assert equal(values(found.chunks), values(fresh.chunks))
    assert found.plain == fresh.plain
    assert (found.chunks is first.chunks) is again


def replace_parameter(model: Model) -> None:
    model[0].bias = nn.Parameter(torch.full((2,), 6.0))


def replace_buffer(model: Model) -> None:
    model[1].running_mean = torch.full((2,), 7.0)


@pytest.mark.parametrize("change", [replace_parameter, replace_buffer])
def test_the_state_of_a_module_follows_what_replaces_its_tensors(change: Any) -> None:
    model = Model()
    state = ModuleState(model)
    state.save_state("model")
    change(model)
    assert equal(values(state.save_state("model").chunks), values(ModuleState(model).save_state("model").chunks))


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load(model: Model, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.AdamW(model.parameters())
    step(model, other)
    optimizer.load_state_dict(other.state_dict())


def add_group(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.25})
    step(model, optimizer)


@pytest.mark.parametrize("change", [step, load, add_group])
def test_the_state_of_an_optimizer_follows_its_changes(change: Any) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = OptimizerState(optimizer, {"model": model})
    state.save_state("optimizer")
    change(model, optimizer)
    found, fresh = state.save_state("optimizer"), OptimizerState(optimizer, {"model": model}).save_state("optimizer")
    assert equal(values(found.chunks), values(fresh.chunks))
    assert found.plain == fresh.plain
    # The parameters that it has got may be of another module.
    assert state.is_of(optimizer, {"other": Model(), "model": model}) is (change is not add_group)
    assert not state.is_of(optimizer, {"model": Model()})
