"""`flk logs` of a job in every state, and its options."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize(
    "which", ["created", "queued", "image missing", "running", "restarting", "exception on rank 1"]
)
def test_what_is_there(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, which: str) -> None:
    jobs.add(fake, which)
    assert terminal("flk logs gpt --no-follow") == snapshot


@pytest.mark.parametrize(
    "options",
    [
        "--rank 1",
        "--rank 0,2",
        "--rank 1-2",
        "--tail 1",
        "--tail 0",
        "--pod 1",
        "-o json",
    ],
)
def test_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    jobs.add(fake, "running")
    assert terminal(f"flk logs gpt --no-follow {options}") == snapshot


def test_options_of_the_request(terminal: Terminal, fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    terminal("flk logs gpt --no-follow --rank 1 --tail 7 --since 5m")
    request = next(request for request in fake.requests if request.path.endswith("/log"))  # later ones are kept
    # Among the last lines may be records, which are not shown.
    assert request.query == {"container": "pytorch", "timestamps": "true", "tailLines": "17", "sinceSeconds": "300"}


def test_following_a_stuck_job_ends_as_the_wait_for_it(
    terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion
) -> None:
    jobs.add(fake, "image missing")
    assert terminal("flk logs gpt") == snapshot


def test_following_an_ended_job(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "exception on rank 1")
    assert terminal("flk logs gpt --rank 1") == snapshot


def test_no_such_job(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    assert terminal("flk logs gpt") == snapshot


def test_job_that_is_gone(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "exception on rank 1")
    terminal("flk logs gpt")
    fake.delete_all()
    assert terminal("flk logs gpt") == snapshot
    assert terminal("flk logs gpt --no-follow --rank 1") == snapshot


def test_no_such_rank(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    assert terminal("flk logs gpt --rank 7") == snapshot


@pytest.mark.parametrize(
    "options",
    [
        "--rank x",
        "--rank ''",
        "--pod ''",
        "-o yaml",
        "--rank 2-1",
        "--tail -1",
        "--tail x",
        "--since yesterday",
        "-n A",
        "--context nowhere",
    ],
)
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk logs gpt {options}") == snapshot
    assert fake.requests == []
