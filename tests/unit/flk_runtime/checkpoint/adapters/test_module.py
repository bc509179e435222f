"""The state of a module whose buffers change their shape, and of one without parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import ModuleState
from flk_runtime.errors import MismatchError


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
    with pytest.raises(MismatchError, match=r"the buffer '0\.rows' of model has the shape \(1, 2\), and had \(0, 2\)"):
        state.save_state("model")


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
