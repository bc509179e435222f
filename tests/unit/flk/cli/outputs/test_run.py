"""`flk run`: mistakes that end before a process starts. What ranks print is in tests/local/test_run.py."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.requirements import with_torch
from tests.unit.flk.cli.outputs import usage
from tests.unit.flk.cli.outputs.conftest import Terminal

OPTIONS = [
    *(pytest.param(each, marks=with_torch) if "--ship" in each else each for each in usage.SOME_JOB_OPTIONS),
    pytest.param("--secret HF_TOKEN=hf:token", marks=with_torch),
    "--timeout 5s",
    "-n team",
]


@pytest.mark.parametrize("options", OPTIONS)
def test_wrong_option(terminal: Terminal, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk run train.py {options}") == snapshot


@pytest.mark.parametrize("script", ["nope.py", "./trian.py"])
def test_missing_script(terminal: Terminal, snapshot: SnapshotAssertion, script: str) -> None:
    assert terminal(f"flk run {script}") == snapshot
