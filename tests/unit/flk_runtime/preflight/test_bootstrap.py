"""Under Horovod the address of the store goes to all ranks by its communicator."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from flk_runtime.discovery import RankInfo
from flk_runtime.preflight import bootstrap, store


def test_the_address_comes_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = SimpleNamespace(init=lambda: None, broadcast_object=lambda *_, root_rank: ("10.0.0.1", 7))
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    reached = []
    monkeypatch.setattr(store, "connect", lambda _, address, port, __: reached.append((address, port)))
    monkeypatch.setattr(bootstrap.distributed_c10d, "PrefixStore", lambda prefix, made: made)
    info = RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2, nodes=2, launcher="horovod")
    bootstrap.connect_store(info, time.monotonic() + 1)
    assert reached == [("10.0.0.1", 7)]
