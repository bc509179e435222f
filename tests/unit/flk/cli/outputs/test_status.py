"""`flk status` of a job in every state, in every format."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize("which", jobs.JOBS)
def test_status(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str) -> None:
    jobs.add(fake, which)
    assert terminal("flk status gpt") == snapshot


@pytest.mark.parametrize(
    ("which", "output"),
    [("running", "wide"), ("exception on rank 1", "json"), ("slow rank", "json")],
)
def test_format(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str, output: str) -> None:
    jobs.add(fake, which)
    assert terminal(f"flk status gpt -o {output}") == snapshot


@pytest.mark.parametrize("line", ["flk status gpt", "flk status GPT", "flk status gpt -n other"])
def test_no_such_job(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot


@pytest.mark.parametrize("options", ["--output xml", "--namespace A", "--context nowhere"])
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk status gpt {options}") == snapshot
    assert fake.requests == []
