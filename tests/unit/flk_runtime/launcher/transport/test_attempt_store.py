"""The ranks' store, in a launcher that has imported torch and in one that has not."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flk_runtime.launcher.transport import attempt_store
from flk_runtime.launcher.transport.attempt_store import AttemptStore
from tests.support.processes import until


@pytest.fixture(params=[True, False], ids=["torch", "no torch"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttemptStore:
    monkeypatch.setattr(attempt_store, "sys", SimpleNamespace(modules={"torch": None} if request.param else {}))
    return AttemptStore(lambda event: pytest.fail(str(event)))


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return True
    return False


def test_ranks_meet_there(store: AttemptStore) -> None:
    ranks = [dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60)) for _ in range(2)]  # type: ignore[attr-defined]
    ranks[0].set("key", "value")
    assert ranks[1].get("key") == b"value"
    store.close()
    del ranks
    until(lambda: refuses(store.port), "its port is closed")


def test_it_is_closed_before_a_rank_has_connected(store: AttemptStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_store, "_serve", lambda *args, **options: pytest.fail("it is served"))
    store.close()
    until(lambda: refuses(store.port), "its port is closed")
