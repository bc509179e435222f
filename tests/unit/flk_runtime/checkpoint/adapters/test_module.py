"""The state of a module whose buffers or extra state change their shape, and of one without parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import ModuleState, chunks_of
from flk_runtime.errors import MismatchError
from tests.support.saved import saved


class Bank(nn.Module):
    """A memory that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 2))
        self.register_buffer("count", torch.zeros(()))
        self.layer = nn.Linear(2, 2)

    def add(self, value: float) -> None:
        self.rows = torch.cat([self.rows, torch.full((1, 2), value)])
        self.count += 1


def test_a_buffer_that_a_restart_could_not_load_is_refused_when_its_shape_has_changed() -> None:
    bank = nn.Sequential(Bank())
    state = ModuleState(bank)
    state.save_state("model")
    bank[0].add(1.0)
    with pytest.raises(MismatchError, match=r"'0\.rows' of model has the shape \(1, 2\), and had \(0, 2\)"):
        state.save_state("model")


class Scales(nn.Module):
    """A layer with an extra state of its own: none at first, then a tensor that grows."""

    def __init__(self, *seen: float) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = [*seen]

    def get_extra_state(self) -> torch.Tensor | None:
        return torch.tensor(self.seen) if self.seen else None

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        self.seen = [] if state is None else state.tolist()


@pytest.mark.parametrize("before", [(), (1.0,), (1.0, 2.0)])
@pytest.mark.parametrize("after", [(), (3.0,)])
def test_an_extra_state_may_become_a_tensor_and_have_another_shape(
    before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    restored = nn.Sequential(Scales(*after))
    ModuleState(restored).load_state(saved("model", ModuleState(nn.Sequential(Scales(*before)))))
    assert restored[0].seen == [*before]


def test_weights_of_a_module_with_an_extra_state_are_loaded_without_it() -> None:
    module = Scales()
    weights = saved("model", ModuleState(nn.Linear(1, 1)))
    weights.checkpoint.add(chunks_of(("model", "layer.weight"), torch.full((1, 1), 7.0)))  # type: ignore[attr-defined]
    weights.checkpoint.add(chunks_of(("model", "layer.bias"), torch.zeros(1)))  # type: ignore[attr-defined]
    ModuleState(module).read(weights)
    assert (module.layer.weight.item(), module.seen) == (7.0, [])


class Inverse(nn.Module):
    """Computes something from what it loads, and takes a state of another version for one of another meaning."""

    _version = 2

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor(value))
        self.inverse = 1 / value

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        assert metadata["version"] == 2
        super()._load_from_state_dict(state, prefix, metadata, *others)
        self.inverse = 1 / self.value.item()


def test_a_module_computes_from_what_is_restored_what_it_computes_from_what_it_loads() -> None:
    module = nn.Sequential(nn.Linear(1, 1), Inverse(2.0))
    module[0].register_load_state_dict_post_hook(lambda *_: told.append(module[0].bias.item()))
    told: list[float] = []
    before = nn.Sequential(nn.Linear(1, 1), Inverse(4.0))
    ModuleState(module).load_state(saved("model", ModuleState(before)))
    assert (module[1].value.item(), module[1].inverse, told) == (4.0, 0.25, [before[0].bias.item()])


class Told(nn.Linear):
    """A layer with a method of its own, which takes nothing but the state."""

    loads = 0

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.loads += 1
        return super().load_state_dict(state)


def test_a_module_is_restored_by_its_own_method_also_if_that_takes_nothing_but_the_state() -> None:
    before, module = nn.Linear(1, 1), Told(1, 1)
    ModuleState(module).load_state(saved("model", ModuleState(before)))
    assert (module.weight.item(), module.loads) == (before.weight.item(), 1)


def test_ranks_hold_a_module_without_parameters_alike() -> None:
    metric = nn.BatchNorm1d(2, affine=False)
    held = ModuleState(metric).held_alike()
    assert [(key, value.dtype) for key, value in held.items()] == [
        ("'running_mean'", torch.float32),
        ("'running_var'", torch.float32),
        ("'num_batches_tracked'", torch.float64),
    ]
    assert ModuleState(nn.BatchNorm1d(2)).held_alike() == {}


def test_ranks_hold_trained_parameters_alike_that_only_the_script_averages() -> None:
    state = ModuleState(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)))
    state.trains_alike = True
    assert list(state.held_alike()) == ["'0.weight'", "'0.bias'"]


@pytest.mark.parametrize(
    ("name", "shape", "begin"),
    [
        ("0.mean", r"\(2,\)", lambda module: setattr(module[0], "mean", torch.zeros(2))),
        ("1.weight", r"\(2, 3\)", lambda module: module[1](torch.zeros(1, 3))),
        ("1.weight", "None", lambda module: None),
    ],
)
def test_what_begins_without_a_shape_and_a_restart_could_not_load_is_refused(
    name: str, shape: str, begin: Callable[[nn.Sequential], object]
) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(2))
    module[0].register_buffer("mean", None)
    state = ModuleState(module)
    begin(module)
    with pytest.raises(MismatchError, match=rf"'{name}' of model has the shape {shape}, and had None at the start"):
        state.save_state("model")
