"""The ranks' store, in a launcher that has imported torch and in one that has not."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flk_runtime.launcher.transport import attempt_store
from flk_runtime.launcher.transport.attempt_store import AttemptStore


@pytest.fixture(params=[True, False], ids=["on this machine", "of pods"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[True, False], ids=["torch", "no torch"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, local: bool) -> AttemptStore:
    monkeypatch.setattr(attempt_store, "sys", SimpleNamespace(modules={"torch": None} if request.param else {}))
    return AttemptStore(lambda event: pytest.fail(str(event)), local=local)


def test_ranks_meet_there(store: AttemptStore, local: bool) -> None:
    if local:  # another address of this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", store.port))
    ranks = [dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60)) for _ in range(2)]  # type: ignore[attr-defined]
    ranks[0].set("key", "value")
    assert ranks[1].get("key") == b"value"
