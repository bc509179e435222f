"""`flk why` of a job in every state, in every format, and `flk explain`."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize("which", jobs.JOBS)
def test_why(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str) -> None:
    jobs.add(fake, which)
    assert terminal("flk why gpt") == snapshot


def test_the_same_failure_of_an_earlier_attempt_is_not_what_is_not_the_cause(
    terminal: Terminal, fake: FakeApiServer
) -> None:
    jobs.failed(jobs.RAISED, jobs.KILLED, jobs.RAISED, jobs.RAISED).add_to(fake)
    said = terminal("flk why gpt")
    assert "was killed by SIGKILL (attempt 1)" in said
    assert said.count("raised ValueError: expected 512 features") == 1
    assert "  record of the launchers\n    attempt 2 ended in the same way\n" in said.partition("remedy:")[0]


def test_json(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "quota exceeded")
    assert terminal("flk why gpt -o json") == snapshot


@pytest.mark.parametrize(
    "line", ["flk why gpt", "flk why gpt -o xml", "flk explain imagenotfound", "flk explain Imagenot"]
)
def test_other_lines(terminal: Terminal, snapshot: SnapshotAssertion, line: str) -> None:
    assert terminal(line) == snapshot
