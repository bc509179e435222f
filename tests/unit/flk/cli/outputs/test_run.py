"""`flk run`: mistakes that end before a process starts. What ranks print is in tests/local/test_run.py."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.unit.flk.cli.outputs import usage
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize("options", [*usage.SOME_JOB_OPTIONS, "--secret HF_TOKEN=hf:token", "--timeout 5s", "-n team"])
def test_wrong_option(terminal: Terminal, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk run train.py {options}") == snapshot


def test_missing_script(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    assert terminal("flk run nope.py") == snapshot
