"""`flk wait` for jobs that have ended and for one that has not."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize("which", [which for which in jobs.JOBS if which != "evicted"])
def test_without_waiting(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str) -> None:
    jobs.add(fake, which)
    assert terminal("flk wait gpt --timeout 0") == snapshot


@pytest.mark.parametrize(
    ("which", "options"),
    [
        ("running", "--timeout 1s"),
        ("unschedulable", "--timeout 1s"),
        ("suspended", "--timeout 1s"),
        ("succeeded", "--for Running"),
    ],
)
def test_options(
    terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str, options: str
) -> None:
    jobs.add(fake, which)
    assert terminal(f"flk wait gpt {options}") == snapshot


def test_no_such_job(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    assert terminal("flk wait gpt") == snapshot


@pytest.mark.parametrize("options", ["--timeout soon", "--timeout -1s", "-n A", "--context nowhere"])
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk wait gpt {options}") == snapshot
    assert fake.requests == []
