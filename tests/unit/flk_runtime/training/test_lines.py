"""What lines of metrics are printed and recorded, and with which losses."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from flk_runtime.distributed import process_group
from flk_runtime.training.lines import Line, Lines


class Kept:
    """A recorder that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def record(self, lines: Sequence[Line]) -> None:
        self.steps += [line.values["step"] for line in lines]

    def describe(self, hyperparameters: object) -> None:
        raise AssertionError("nothing is described")


def test_the_loss_of_a_line_is_the_mean_over_the_ranks_that_give_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[float, float]] = []

    def mean(value: float, weight: float) -> float:
        asked.append((value, weight))
        return 7.0

    monkeypatch.setattr(process_group, "mean", mean)
    lines = Lines(0, 2)
    lines.recorders.append(kept := Kept())
    lines.add({"step": 1, "loss": 1.0}, 1.0)
    lines.add({"step": 2}, None)
    Lines(1, 2).add({"step": 2, "loss": 3.0}, 3.0)
    lines.log({"step": 2, "val": torch.ones(1), "of": {"a": torch.tensor([1, 2])}})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"step": 1, "loss": 7.0},
        {"step": 2},
        {"step": 2, "val": 1.0, "of": {"a": [1, 2]}},
    ]
    assert asked == [(1.0, 1.0), (0.0, 0.0), (3.0, 1.0)]
    assert kept.steps == [1, 2, 2]
