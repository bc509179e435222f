from __future__ import annotations

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import find_blocks, inner_first, shardable_blocks


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


def test_modules_that_are_shared_at_each_level_are_walked_once() -> None:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(60):
        model = nn.Sequential(model, nn.Sequential(model))
    assert len(inner_first(model)) == 121
    assert inner_first(model)[-1] is model


def test_by_default_a_repeated_class_that_is_made_of_modules() -> None:
    model = Net(Block(), nn.Linear(4, 4), nn.Linear(4, 4), Block(), nn.Sequential(nn.Linear(4, 4)))
    assert names(model, find_blocks(model, None)) == ["parts.0", "parts.3"]
    assert find_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None) == []
    stacked = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 4))
    assert names(stacked, find_blocks(stacked, None)) == ["0.0", "0.1"]


def test_by_class_and_by_name() -> None:
    model = Net(Block(), nn.Sequential(nn.Linear(4, 4)))
    for wanted in (Block, "Block", [Block], ("Block",)):
        assert names(model, find_blocks(model, wanted)) == ["parts.0"]
    assert names(model, find_blocks(model, [Block, "Sequential"])) == ["parts.0", "parts.1"]
    assert find_blocks(model, Net) == []
    with pytest.raises(
        SetupError,
        match="no module of this class or path; it has Block, ModuleList, Net, Sequential, and the parts first",
    ):
        find_blocks(model, "Layer")
    with pytest.raises(SetupError, match="expected classes of modules"):
        find_blocks(model, [3])  # type: ignore[list-item]


def test_blocks_are_found_by_patterns_of_their_paths() -> None:
    model = Net(Block(), Block(), nn.Sequential(nn.Linear(4, 4)))
    assert names(model, find_blocks(model, ["parts.*", "first"])) == ["first", "parts.0", "parts.1", "parts.2"]
    assert names(model, find_blocks(model, "parts.*.inner")) == ["parts.0.inner", "parts.1.inner"]
    assert names(model, find_blocks(model, ["Sequential", "parts.[01]"])) == ["parts.0", "parts.1", "parts.2"]
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert find_blocks(compiled, "parts.0") == [model.parts[0]]
    with pytest.raises(SetupError, match="blocks has 'parts', a ModuleList, which is not called: name its parts"):
        find_blocks(model, "parts")


def test_a_block_that_shares_a_parameter_with_modules_outside_is_not_sharded_alone() -> None:
    model = Net(Block(), Block(), Block())
    model.last.weight = model.parts[2].linear.weight
    found = find_blocks(model, None)
    assert names(model, shardable_blocks(model, found)) == ["parts.0", "parts.1"]
    model.parts[0].inner.weight = model.parts[0].linear.weight  # within one block
    assert names(model, shardable_blocks(model, found)) == ["parts.0", "parts.1"]
