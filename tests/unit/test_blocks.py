from __future__ import annotations

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel import blocks


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner or nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.linear(x))
        return out


class Net(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList(parts)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        out: torch.Tensor = self.last(x)
        return out


def names(model: nn.Module, found: list[nn.Module]) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(module)] for module in found]


def test_by_default_a_repeated_class_that_is_made_of_modules() -> None:
    model = Net(Block(), nn.Linear(4, 4), nn.Linear(4, 4), Block(), nn.Sequential(nn.Linear(4, 4)))
    assert names(model, blocks.find(model, None)) == ["parts.0", "parts.3"]
    assert blocks.find(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None) == []
    stacked = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 4))
    assert names(stacked, blocks.find(stacked, None)) == ["0.0", "0.1"]


def test_blocks_within_blocks_are_not_looked_for() -> None:
    model = Net(*(Block(nn.Sequential(Block(), Block())) for _ in range(2)))
    assert names(model, blocks.find(model, None)) == ["parts.0", "parts.1"]
    # By name all of them are blocks, inner ones first.
    assert names(model, blocks.find(model, "Block")) == [
        "parts.0.inner.0", "parts.0.inner.1", "parts.0", "parts.1.inner.0", "parts.1.inner.1", "parts.1",
    ]  # fmt: skip


def test_by_class_and_by_name() -> None:
    model = Net(Block(), nn.Sequential(nn.Linear(4, 4)))
    for wanted in (Block, "Block", [Block], ("Block",)):
        assert names(model, blocks.find(model, wanted)) == ["parts.0"]
    assert names(model, blocks.find(model, [Block, "Sequential"])) == ["parts.0", "parts.1"]
    assert blocks.find(model, Net) == []
    with pytest.raises(SetupError, match="the model has no Layer to make a block of; it is made of Block, ModuleList"):
        blocks.find(model, "Layer")
    with pytest.raises(SetupError, match="expected classes of modules"):
        blocks.find(model, [3])  # type: ignore[list-item]


def test_by_the_number_of_parameters_that_smaller_blocks_do_not_have() -> None:
    model = Net(Block(), Block())
    assert names(model, blocks.find(model, 20)) == [
        "first", "parts.0.linear", "parts.0.inner", "parts.1.linear", "parts.1.inner", "last",
    ]  # fmt: skip
    assert names(model, blocks.find(model, 40)) == ["parts.0", "parts.1"]
    assert blocks.find(model, 1000) == []
    attention = nn.Sequential(nn.MultiheadAttention(4, 2))
    assert names(attention, blocks.find(attention, 20)) == ["0"]


def test_a_block_whose_parameters_are_used_outside_is_no_unit() -> None:
    model = Net(Block(), Block(), Block())
    model.last.weight = model.parts[2].linear.weight
    found = blocks.find(model, None)
    assert names(model, blocks.units(model, found)) == ["parts.0", "parts.1"]
    model.parts[0].inner.weight = model.parts[0].linear.weight  # within one block
    assert names(model, blocks.units(model, found)) == ["parts.0", "parts.1"]


def test_recomputed_blocks_keep_names_classes_and_gradients() -> None:
    plain, again = (Net(Block(), Block()) for _ in range(2))
    again.load_state_dict(plain.state_dict())
    blocks.rewire(blocks.find(again, None), recompute=True, backend=None)
    assert isinstance(again.parts[0], Block)
    assert type(again.parts[0]).__name__ == "Block"
    assert again.state_dict().keys() == plain.state_dict().keys()
    for model in (plain, again):
        model(torch.ones(2, 4)).sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    again.parts[0].forward = lambda x: x
    with pytest.raises(SetupError, match="a Block has a forward of its own instance"):
        blocks.rewire([again.parts[0]], recompute=True, backend=None)
