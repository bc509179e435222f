"""What lines of metrics are printed and recorded, and with which losses."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flk_runtime.distributed import process_group
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.training.lines import Line, Lines, Metrics


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


@dataclass
class Unset:
    """Its field has no value yet."""

    value: int = field(init=False)


def test_a_line_may_have_values_that_cannot_be_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(1, 2).log({"environment": os.environ})
    Lines(0, 2).log({"of": [type("Pair", (Unset,), {"__str__": lambda _: "a pair"})()]})
    assert json.loads(capsys.readouterr().out) == {"of": ["a pair"]}


def metrics_of(page: ProgressPage) -> Metrics:
    return Metrics(torch.device("cpu"), 1, page, lambda text: None)


def test_the_launcher_reads_the_share_of_waiting_for_data_of_the_latest_line() -> None:
    page = ProgressPage.private()
    metrics = metrics_of(page)
    assert page.data_wait == -1  # not known before a line
    metrics.waited += 1000.0
    assert metrics.read() == {"data_wait": 1.0}
    assert page.data_wait == 1
    assert metrics.read() == {"data_wait": 0.0}
    assert page.data_wait == 0


def test_communication_is_told_only_where_it_is_measured(tmp_path: Path) -> None:
    page = ProgressPage.create(tmp_path / "page")
    metrics = metrics_of(page)
    assert metrics.read()["comm"] == 0.0
    page.samples, page.pending_samples = 4, 1
    assert metrics.read()["comm"] == 0.25
    assert metrics.read()["comm"] == 0.25  # without a new sample
    page.untold = 1
    assert "comm" not in metrics.read()
