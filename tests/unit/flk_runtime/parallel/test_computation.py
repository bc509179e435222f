"""Blocks that compute their activations again, and that are compiled."""

from __future__ import annotations

import copy
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.computation import check_recomputed, recompute_activations


class Block(nn.Module):
    """Counts its forward passes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        type(self).calls += 1
        out: torch.Tensor = self.linear(x).tanh() * scale
        return out


def make(recompute: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model if recompute else ():
        recompute_activations(block)
    return model


def train(model: nn.Module) -> list[torch.Tensor]:
    Block.calls = 0
    model(torch.ones(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_copies_recompute_by_themselves() -> None:
    model = make(recompute=True)
    expected = train(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        found = train(twin)
        assert Block.calls == 4
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        twin[0].linear.weight.data.zero_()
        assert not torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_forward_of_its_own_is_refused() -> None:
    block = Block()
    block.forward = lambda x: x  # type: ignore[assignment,method-assign]
    with pytest.raises(SetupError, match="a Block has a forward attribute of its own"):
        recompute_activations(block)


def test_statistics_that_a_recomputation_would_change_twice_are_refused() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for given in (False, "eager", {"backend": "eager", "fullgraph": True}):
        with pytest.raises(SetupError, match=r"statistics of a BatchNorm1d twice .* compile='aot_eager'"):
            check_recomputed([block], given)
    check_recomputed([block], "aot_eager")
    check_recomputed([block], True)
    with pytest.raises(SetupError):
        check_recomputed([block.eval()], False)  # it may train later
    check_recomputed([block.requires_grad_(False)], False)  # it stays as it is


def test_the_generators_of_the_devices_of_named_arguments_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else dropout on a GPU would draw other numbers in the recomputation, and the gradients would be wrong."""
    monkeypatch.setattr("torch.utils.checkpoint._infer_device_type", look := Mock(return_value="cpu"))
    recompute_activations(block := Block())
    block(x=torch.ones(2, 4)).sum().backward()
    assert "tensor(" in str(look.call_args.args)


def test_an_argument_may_be_called_module() -> None:
    class Named(Block):
        def forward(self, *, module: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(module)

    recompute_activations(block := Named())
    assert block(module=torch.ones(2, 4)).shape == (2, 4)
