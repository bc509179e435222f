"""Plain values of a state as bytes: only what can be read back."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from flk_runtime.checkpoint.save.plain_values import PlainValues
from flk_runtime.errors import MismatchError


class Unsaved:
    """An object that pickle refuses."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_values_are_read_back_as_they_were_and_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    values, load, loaded = PlainValues(), torch.load, []
    monkeypatch.setattr(torch, "load", lambda *args, **named: loaded.append(load(*args, **named)))
    digits, size = {"random": "c0ffee" * 200}, torch.Size([2])
    states = [{"steps": 1}, {"steps": 2}, {"steps": OrderedDict(a=3)}, {"steps": OrderedDict(a=4)}, digits]
    for plain in [*states, digits | {"steps": OrderedDict(a=5)}, digits | {"steps": size}, {"steps": [size]}]:
        found = values.to_bytes(plain)
        assert load(io.BytesIO(found), weights_only=True) == plain
    assert loaded == [{"steps": 1}, {"steps": OrderedDict(a=3)}, digits | {"steps": size}]


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        (
            {"objects": {"log": [1], "best": {"best": Unsaved()}}},
            r"the state_dict\(\) of best cannot be saved",
        ),
        ({"own": {"best": range}}, r"the state_dict\(\) of best holds a "),
        ({"steps": Unsaved()}, "it cannot be saved and read back: it stays here"),
    ],
)
def test_what_cannot_be_read_back_is_refused_with_its_object(plain: dict[str, Any], reason: str) -> None:
    with pytest.raises(MismatchError, match=f"^cannot save this state: {reason}"):
        PlainValues().to_bytes(plain)
