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
        "flk cp gpt:/a bert:/b",
        "flk cp gpt: here",
        "flk cp GPT:/a here",
        "flk cp gpt:rank/x:/a here",
        "flk cp gpt:rank/1:/a here --rank 2",
        "flk cp gpt:rank/9:/a here",
        "flk cp gpt:pod/9:/a here",
        "flk cp gpt:/a here -c sidecar",
        "flk cp gpt:/a nowhere/here",
        "flk cp nowhere.txt gpt:/a",
        "flk cp nowhere:/a here",
        "flk exec gpt --rank 1 --pod 1",
        "flk exec gpt --pod gpt-worker-7",
        "flk exec gpt -c sidecar -- ls",
        "flk logs gpt --no-follow -c sidecar",
        "flk logs gpt -c sidecar",
        "flk port-forward gpt",
        "flk port-forward gpt 8000 x",
        "flk port-forward gpt 8000 --address 203.0.113.7",
    ],
)
def test_refused(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    jobs.add(fake, "running")
    assert terminal(line) == snapshot
