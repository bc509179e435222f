"""Under Horovod the address of the store goes to all ranks by its communicator, or it is said what is missing."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError
from flk_runtime.preflight import bootstrap, store

INFO = RankInfo(rank=1, world_size=4, local_rank=1, local_world_size=2, nodes=2, launcher="horovod")


def install(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Make a Horovod importable in which this process has this rank, and rank 0 has sent an address."""
    hvd = SimpleNamespace(
        init=lambda: None, rank=lambda: rank, size=lambda: 4, broadcast_object=lambda *_, root_rank: ("10.0.0.1", 7)
    )
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=hvd))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)


def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `connect_store` connects to."""
    reached = []
    monkeypatch.setattr(store, "connect", lambda _, address, port, __: reached.append((address, port)))
    monkeypatch.setattr(bootstrap.distributed_c10d, "PrefixStore", lambda prefix, made: made)
    bootstrap.connect_store(INFO, time.monotonic() + 1)
    return reached


def test_the_address_comes_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, rank=1)
    assert connect(monkeypatch) == [("10.0.0.1", 7)]


def test_a_horovod_that_numbers_ranks_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, rank=0)
    with pytest.raises(SetupError, match=r"0 of 4, but .* are 1 and 4"):
        connect(monkeypatch)


def test_a_missing_horovod_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SetupError, match="install it, or set MASTER_ADDR"):
        connect(monkeypatch)
