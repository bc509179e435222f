"""`flk cp`, `flk exec`, `flk port-forward` and `flk logs -c`: what is refused before anything is opened."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize(
    "line",
    [
        "flk cp",
        "flk cp a b",
        "flk cp gpt:/a here --rank 9",
        "flk cp here.txt gpt:/a",
        "flk cp nowhere:/a here",
        "flk exec gpt --rank 1 --pod 1",
        "flk exec gpt --pod gpt-worker-7",
        "flk exec gpt -c sidecar -- ls",
        "flk logs gpt --no-follow -c sidecar",
        "flk logs gpt -c sidecar",
        "flk port-forward gpt",
        "flk port-forward gpt 8000 x",
    ],
)
def test_refused(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    jobs.add(fake, "running")
    assert terminal(line) == snapshot
