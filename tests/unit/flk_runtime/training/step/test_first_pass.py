"""What is done at the first forward pass with gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.training.step.first_pass import at_first_pass, set_random_states_at_first_pass

ONE = torch.ones(1, 1)


def test_begins_once_before_the_first_call_with_gradients() -> None:
    models, begun = [nn.Linear(1, 1) for _ in range(2)], []
    at_first_pass(models, lambda: begun.append("begun"))
    with torch.no_grad():
        models[0](ONE)
    assert not begun
    models[1].register_forward_hook(lambda *_: begun.append("called"))
    models[1](ONE), models[0](ONE)
    assert begun == ["begun", "called"]
    assert not models[0]._forward_pre_hooks


def test_copies_of_a_module_begin_nothing() -> None:
    model, begun = nn.Linear(1, 1), []
    at_first_pass([model], lambda: begun.append("begun"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(ONE)
    assert not begun


def test_the_compiler_traces_nothing_of_it() -> None:
    model, begun = nn.Linear(1, 1), []
    at_first_pass([model], lambda: begun.append("begun"))
    torch.compile(lambda value: model(value), backend="eager", fullgraph=True)(ONE)
    assert not begun
    model(ONE)
    assert begun == ["begun"]


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(model, backend="eager", fullgraph=True),
        lambda model: model.compile(backend="eager") or model,
    ],
    ids=["compile", "fullgraph", "in place"],
)
def test_begins_outside_of_the_graph_of_a_compiled_module(compiled: Callable[[nn.Module], Any]) -> None:
    class Scale(nn.Linear):  # the compiler traces no module of torch's own as a frame
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value).relu()

    model, begun = Scale(1, 1), []
    at_first_pass([model], lambda: begun.append(torch.compiler.is_compiling()))
    call = compiled(model)
    with torch.no_grad():
        call(ONE)
    assert not begun
    call(ONE), call(ONE)
    assert begun == [False]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("was_set", [False, True])
def test_random_numbers_that_a_resumed_script_draws_before_the_first_pass_are_said(
    *, draws: bool, was_set: bool
) -> None:
    """Unless the states have been set before them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, said = nn.Linear(1, 1), []
        states = iter([lambda: torch.manual_seed(2), lambda: None])

        def set_states() -> None:  # once, as the manager of checkpoints does
            next(states)()

        set_random_states_at_first_pass([model], set_states, lambda: said.append("drawn"))
        if was_set:
            set_states()
        if draws:
            torch.rand(1)
        model(ONE), model(ONE)
        assert bool(said) is (draws and not was_set)
