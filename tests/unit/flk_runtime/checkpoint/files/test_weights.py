"""Weights are found as scripts save them: below the names of wrappers, beside other values, tied ones once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import ModuleState
from flk_runtime.checkpoint.files import Weights
from flk_runtime.checkpoint.load import SavedObject
from flk_runtime.errors import MismatchError


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2, bias=False)))


def load(model: nn.Module, file: Path) -> nn.Module:
    weights: Any = Weights(str(file))
    ModuleState(model).read(SavedObject(weights, "model", {}))
    return model


STATE = build().state_dict()
OTHER = {key: value + 1 for key, value in STATE.items()}
ADAM = {"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": [{"params": [0]}]}


@pytest.mark.parametrize(
    "content",
    [
        {f"module.{key}": value for key, value in STATE.items()},
        {f"_orig_mod.{key}": value for key, value in STATE.items()},
        {f"_orig_mod.module.{key}": value for key, value in STATE.items()},
        {key.replace("1.0", "1._orig_mod.0"): value for key, value in STATE.items()},
        {f"model.{key}": value for key, value in STATE.items()} | {"model.more": torch.ones(1)},
        {"model_state_dict": STATE, "optimizer_state_dict": ADAM, "epoch": 3},
        {"state_dict": {f"module.{key}": value for key, value in STATE.items()}, "best": 0.5},
        {"model": STATE, "optimizer": ADAM, "ema": OTHER},
        {"net": STATE},
        {"model": {"state_dict": STATE}},
    ],
)
def test_weights_are_found_below_wrappers_and_beside_other_values(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    found = load(build(), tmp_path / "weights.pt").state_dict()
    assert all(torch.equal(value, STATE[key]) for key, value in found.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({f"module.{key}": value for key, value in STATE.items() if key != "0.bias"}, r"no tensor '0\.bias'"),
        (
            {"head": torch.ones(1), **{f"module.{key}": value for key, value in STATE.items()}},
            "its tensors are 'head', ",
        ),
        ({"student": STATE, "teacher": OTHER}, "'student' is a OrderedDict; save the weights alone, or under the key"),
        ({"epoch": 3, **STATE}, "'epoch' is a int"),
        ([STATE], "holds a list, and no state_dict"),
        ({**STATE, "0.weight": torch.ones(1)}, r"'0\.weight' has the shape \(1,\) .*, and the shape \(3, 2\) here"),
    ],
)
def test_what_is_missing_is_named(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(MismatchError, match=words):
        load(build(), tmp_path / "weights.pt")


def test_a_model_may_have_the_name_of_a_wrapper_itself(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    found = load(nn.ModuleDict({"module": nn.Linear(2, 2)}), tmp_path / "weights.pt")
    assert torch.equal(found["module"].weight, model["module"].weight)  # type: ignore[index]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.words.weight


@pytest.mark.parametrize("name", ["words.weight", "head.weight", "module.words.weight"])
def test_one_name_of_a_tied_parameter_is_enough(name: str, tmp_path: Path) -> None:
    value = torch.rand(4, 2)
    torch.save({name: value}, tmp_path / "weights.pt")
    model = load(Tied(), tmp_path / "weights.pt")
    assert torch.equal(model.head.weight, value)
