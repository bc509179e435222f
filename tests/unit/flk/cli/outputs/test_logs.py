"""`flk logs` of a job in every state, and its options."""

from __future__ import annotations

from typing import Any

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
    ["--rank 1", "--rank 0,2", "--rank 1-2", "--tail 1", "--tail 0", "--raw", "--previous", "--pod 1", "--grep '10 l'"],
)
def test_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    jobs.add(fake, "running")
    assert terminal(f"flk logs gpt --no-follow {options}") == snapshot


@pytest.mark.parametrize("options", ["-o json", "--output-folder logs"])
def test_format(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    jobs.add(fake, "running")
    assert terminal(f"flk logs gpt --no-follow {options}") == snapshot
    if "folder" in options:
        files = {path.name: path.read_text() for path in (terminal.folder / "logs").iterdir()}
        assert files == {f"rank-{n}.log": "step 10 loss 2.31\nstep 20 loss 2.07\n" for n in range(3)}


def test_first_error(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "exception on rank 1")
    lines = "".join(f"[rank 1] {line}\n" for line in jobs.TRACEBACK.splitlines())
    fake.written["gpt-worker-1"] += lines
    assert terminal("flk logs gpt --first-error") == snapshot


@pytest.mark.parametrize("lines", [2, 2000])  # which are written at the end, or before
def test_files_that_cannot_be_written(terminal: Terminal, fake: FakeApiServer, lines: int) -> None:
    jobs.add(fake, "running")
    fake.written["gpt-worker-0"] = "[rank 0] step 10 loss 2.31\n" * lines
    read = fake._log

    def fill_the_disk(*request: Any) -> Any:
        (terminal.folder / "logs" / "rank-0.log").unlink(missing_ok=True)
        (terminal.folder / "logs" / "rank-0.log").symlink_to("/dev/full")
        return read(*request)

    fake._log = fill_the_disk  # type: ignore[method-assign]
    said = terminal("flk logs gpt --no-follow --rank 0 --output-folder logs")
    assert "error: --output-folder: logs/rank-0.log cannot be written: No space left on device\n" in said


def test_folder_that_is_not_empty(terminal: Terminal, snapshot: SnapshotAssertion) -> None:
    assert terminal("flk logs gpt --output-folder .") == snapshot


def test_options_of_the_request(terminal: Terminal, fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    terminal("flk logs gpt --no-follow --rank 1 --tail 7 --since 5m")
    request = next(request for request in fake.requests if request.path.endswith("/log"))  # later ones are kept
    # Among the last lines may be records, which are not shown.
    assert request.query == {"container": "pytorch", "timestamps": "true", "tailLines": "17", "sinceSeconds": "300"}


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
        "--grep '('",
        "-o yaml",
        "--first-error --rank 1",
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
