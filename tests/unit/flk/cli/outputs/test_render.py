"""`flk render`: the manifests, and mistakes."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import usage
from tests.unit.flk.cli.outputs.conftest import Terminal

WRONG_OPTIONS = [*usage.SOME_JOB_OPTIONS, "--namespace A", "--output xml", "--context x"]


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk render train.py {options}") == snapshot
    assert fake.requests == []


@pytest.mark.parametrize(
    "line",
    [
        "flk render train.py --name gpt --no-ship",
        "flk render train.py --name gpt --no-ship -n team -o json",
        "flk render train.py --name gpt",
    ],
)
def test_manifests(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot
    assert fake.requests == []
