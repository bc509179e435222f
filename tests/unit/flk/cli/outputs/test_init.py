"""`flk init`: what it writes and says."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize(
    "line", ["flk init", "flk init --replicas 3 other.py", "flk init --replicas 0", "flk init --replicas x"]
)
def test_empty_folder(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot


def test_file_that_it_writes(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    terminal("flk init")
    assert (terminal.folder / "flk.yaml").read_text() == snapshot


def test_folder_that_cannot_be_written(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    (terminal.folder / "flk.yaml").mkdir()
    assert terminal("flk init --force") == snapshot
