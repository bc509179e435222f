"""`flk` itself: help, version, and words that are no command."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize(
    "line", ["flk --help", "flk --version", "flk submit --help", "flk submit --help-all", "flk status --help"]
)
def test_help(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot


@pytest.mark.parametrize(
    ("line", "same"), [("flk", "flk --help"), ("flk -h", "flk --help"), ("flk -V", "flk --version")]
)
def test_other_words_for_it(terminal: Terminal, line: str, same: str) -> None:
    assert terminal(line).splitlines()[1:] == terminal(same).splitlines()[1:]


@pytest.mark.parametrize(
    "line",
    [
        "flk statsu",
        "flk stop gpt",
        "flk ''",
        "flk frobnicate",
        "flk --nope",
        "flk --context x list",
        "flk train.py",
        "flk submit train.py --replica 4",
        "flk submit --replicas",
        "flk submit train.py -z",
        "flk run train.py --lr 0.1",
        "flk exec gpt ls -la",
        "flk list gpt",
        "flk list --wide",
        "flk status",
        "flk status gpt mine",
        "flk logs",
        "flk wait",
        "flk delete",
        "flk init a b",
    ],
)
def test_wrong_words(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot
