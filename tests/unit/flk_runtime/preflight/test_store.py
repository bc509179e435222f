"""What a rank says that cannot reach the store: the step that failed, and what to do."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import RendezvousError
from flk_runtime.preflight import store

INFO = RankInfo(rank=3, world_size=4, local_rank=1, local_world_size=2, nodes=2)


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        ("gpt-0", socket.gaierror(-2, "unknown"), "([Errno -2] unknown): the name does not resolve there"),
        ("192.0.2.1", ConnectionRefusedError("refused"), "(refused): nothing listens there"),
        ("192.0.2.1", store._NotAStoreError("no answer"), "(no answer): another program uses the port"),
        ("192.0.2.1", TimeoutError("timed out"), "(timed out): check that MASTER_ADDR is an address of rank 0's node"),
        ("192.0.2.1", RuntimeError("bad magic\nmore"), "(bad magic): another program may use the port"),
    ],
)
def test_each_failure_has_its_own_sentence(
    monkeypatch: pytest.MonkeyPatch, address: str, error: Exception, said: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(RendezvousError) as raised:
        store.connect(INFO, address, 29500, time.monotonic())
    assert str(raised.value).startswith("rank 3 on node ")
    assert f"did not reach the master {address}:29500 {said}" in str(raised.value)


def test_a_store_that_starts_slowly_is_awaited_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> str:
        time.sleep(0.1)
        return "a store"

    monkeypatch.setattr(dist, "TCPStore", start)
    monkeypatch.setattr(store, "_ATTEMPT", 0.01)
    assert store.serve(time.monotonic() + 60) == "a store"
