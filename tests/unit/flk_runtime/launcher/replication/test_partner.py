"""The partner of a pod: how often a launcher tries to reach it, and what it says where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk_runtime.launcher.replication import partner as module
from flk_runtime.launcher.replication.partner import Partner
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.replication.store import ShardStore
from flk_runtime.launcher.settings import Settings
from flk_runtime.wire import VersionError

SHARD = ShardId(CheckpointId("a1b2", 7, 2, 1), 1)


class Partners:
    """A partner that cannot be reached because of ``error``, and the time that passes meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, error: Exception) -> None:
        self.now, self.waits, self.tries, self.lines = 1000.0, [0.0][:0], 0, [""][:0]
        self._error = error
        monkeypatch.setattr(module, "connect", self._connect)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self._sleep)
        settings = Settings(("train.py",), lease=15.0)
        self.partner = Partner(settings, ShardStore(folder, 1 << 20), (1, ("10.0.0.2", 80)), self.lines.append)

    def _connect(self, *arguments: object) -> None:
        self.tries += 1
        raise self._error

    def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_a_partner_of_another_version_is_named_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Partners(monkeypatch, tmp_path, VersionError("it speaks version 3 of flk's protocol"))
    for _ in range(3):
        assert not other.partner.send(SHARD)
        other.now += 3600
    assert (other.tries, other.waits) == (1, [])
    assert len(other.lines) == 1
    assert "version 3" in other.lines[0]


def test_a_partner_that_does_not_answer_is_tried_less_and_less_often_for_a_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = Partners(monkeypatch, tmp_path, ConnectionRefusedError(111, "Connection refused"))
    assert not silent.partner.send(SHARD)
    assert silent.now >= 1015
    assert silent.waits[0] < silent.waits[-1] <= 1.5
    assert len(set(silent.waits)) == len(silent.waits)  # a part of each is random
    before = silent.tries
    silent.now += 1
    assert not silent.partner.send(SHARD)
    assert silent.tries == before  # a pause
    silent.now += 3600
    assert not silent.partner.send(SHARD)
    assert silent.tries > before
    assert len(silent.lines) == 1


def test_saves_do_not_wait_a_lease_each_for_a_partner_that_was_not_reached_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = Partners(monkeypatch, tmp_path, ConnectionRefusedError(111, "Connection refused"))
    assert not silent.partner.send(SHARD)
    for _ in range(3):
        silent.now += 31
        before = silent.tries, silent.now
        assert not silent.partner.send(SHARD)
        assert (silent.tries, silent.now) == (before[0] + 1, before[1])
