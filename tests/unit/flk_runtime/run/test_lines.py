"""When lines of metrics are printed, and with which losses."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from flk_runtime.contract.metrics_line import parse
from flk_runtime.distributed import process_group
from flk_runtime.run import lines as module
from flk_runtime.run.lines import Line, Lines

OTHER = 3.0  # the loss of the other rank, for each line


class Group:
    """The collectives with another rank, which says ``following`` as rank 0, and a clock."""

    def __init__(self) -> None:
        self.now, self.collectives, self.following = 100.0, 0, 0.0

    def monotonic(self) -> float:
        return self.now

    def total(self, numbers: array[float]) -> Sequence[float]:
        self.collectives += 1
        others = [self.following, *([OTHER, 1.0] * (len(numbers) // 2))]
        return [own + other for own, other in zip(numbers, others, strict=True)]


class Kept:
    """A recorder that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def record(self, lines: Sequence[Line]) -> None:
        self.calls.append([(line.values["step"], line.values.get("loss")) for line in lines])

    def describe(self, hyperparameters: object) -> None:
        raise AssertionError("nothing is described")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    group = Group()
    monkeypatch.setattr(process_group, "total", group.total)
    monkeypatch.setattr(module.time, "monotonic", group.monotonic)
    monkeypatch.setattr(module, "atexit", Mock())  # lines that wait at the end of a test are not printed
    return group


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The lines without the times that some have."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [{name: value for name, value in line.items() if name != "at"} for line in lines]


def train(lines: Lines, group: Group, steps: range, seconds: float) -> None:
    for step in steps:
        group.now += seconds
        lines.add({"step": step, "loss": 1.0}, 1.0)


def test_lines_of_two_seconds_share_a_collective(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    lines, kept = Lines(0, 2), Kept()
    lines.recorders.append(kept)
    train(lines, group, range(41), 0.25)
    assert group.collectives == 41, "in the first seconds each line is printed at once"
    train(lines, group, range(41, 50), 0.25)
    assert group.collectives == 42
    assert [line["step"] for line in printed(capsys)] == list(range(49)), "in their order; the last one waits"
    assert kept.calls[-1] == [(step, 2.0) for step in range(41, 49)]
    lines.flush()
    lines.flush()
    assert group.collectives == 43, "none where no line waits"
    assert printed(capsys) == [{"step": 49, "loss": 2.0}]


def test_lines_that_wait_say_when_they_were_made(
    group: Group, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 1e9 + group.now)
    lines = Lines(0, 2)
    train(lines, group, range(41), 0.25)
    assert '"at"' not in capsys.readouterr().out
    train(lines, group, range(41, 42), 0.25)
    lines.log({"step": 41, "accuracy": 0.5})
    train(lines, group, range(42, 49), 0.25)
    found = [parse(line) for line in capsys.readouterr().out.splitlines()]
    made = [each and each.time(1e9 + group.now) - 1e9 for each in found]
    assert made == [110.5, 110.5, 110.75, 111.0, 111.25, 111.5, 111.75, 112.0, 112.25]


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_rare_lines_are_printed_at_once(group: Group, capsys: pytest.CaptureFixture[str], seconds: float) -> None:
    lines = Lines(0, 2)
    for step in range(30):
        train(lines, group, range(step, step + 1), seconds)
        assert printed(capsys) == [{"step": step, "loss": 2.0}]


def test_not_many_lines_wait_however_fast_they_come(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(0, 2)
    train(lines, group, range(1, 1200), 0.01)
    assert printed(capsys)[-1]["step"] > 1200 - 17


def test_a_line_of_the_script_comes_after_those_of_the_steps_before_it(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(0, 2)
    lines.log({"step": 0, "accuracy": 0.5})
    assert printed(capsys) == [{"step": 0, "accuracy": 0.5}]
    train(lines, group, range(42), 0.25)
    printed(capsys)
    accuracy = torch.tensor([0.75])
    lines.log({"step": 41, "validation": {"accuracy": accuracy}})
    accuracy.zero_()
    assert printed(capsys) == []
    lines.flush()
    assert printed(capsys)[-2:] == [{"step": 41, "loss": 2.0}, {"step": 41, "validation": {"accuracy": 0.75}}]


def test_a_run_that_ends_without_the_others_prints_its_own_losses(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, kept = Lines(0, 2), Kept()
    train(lines, group, range(42), 0.25)
    printed(capsys)
    lines.recorders.append(kept)
    lines.log({"step": 41, "accuracy": 0.5})
    before = group.collectives
    lines.close()
    lines.close()
    assert group.collectives == before
    assert printed(capsys) == [{"step": 41, "loss": 1.0, "ranks": 1}, {"step": 41, "accuracy": 0.5}]
    assert kept.calls == [[(41, None)]], "the curve of the loss is that of the means"


def test_the_mean_is_over_the_ranks_that_give_a_loss(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    one = Lines(1, 2)
    group.following = 1.0
    one.add({"step": 1, "loss": 1.0}, 1.0)
    assert (group.collectives, printed(capsys)) == (1, []), "rank 0 prints"
    group.following = 0.0
    zero = Lines(0, 2)
    zero.add({"step": 1}, None)
    assert printed(capsys) == [{"step": 1}], "rank 0 gives none, and takes part"
    zero.add({"step": 2, "loss": float("nan")}, float("nan"))
    assert printed(capsys) == [{"step": 2, "loss": "nan"}]


def test_all_ranks_wait_for_as_many_lines_as_rank_0_says(group: Group) -> None:
    one = Lines(1, 2)
    group.following = 4.0
    train(one, group, range(9), 0.2)
    assert group.collectives == 3, "after line 1, and after 4 each"


def test_a_single_rank_needs_no_collective(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(0, 1)
    train(lines, group, range(100), 0.2)
    assert group.collectives == 0
    assert printed(capsys) == [{"step": step, "loss": 1.0} for step in range(100)]
