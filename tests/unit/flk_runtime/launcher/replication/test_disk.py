"""Folders for checkpoints on a local disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flk_runtime.launcher.replication import disk


def test_the_limit_on_a_disk_is_half_of_what_is_free_or_was_used_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").write_bytes(bytes(1 << 20))
    os.sync()  # it has its blocks
    free, left = os.statvfs(tmp_path), (tmp_path / "left").stat().st_blocks << 9
    fixed = os.statvfs_result((*free[:4], 4096, *free[5:]))  # blocks that are free to this user
    monkeypatch.setattr(os, "statvfs", lambda folder: fixed)
    whole = 4096 * free.f_frsize + left
    assert disk.limit(tmp_path, 123, 1) == 123
    assert disk.limit(tmp_path, None, 0) == whole // 2
    assert disk.limit(tmp_path, None, 1000) == 500, "a pod that takes more of its node's disk is evicted"
    assert disk.limit(tmp_path, None, 1 << 60) == whole // 2


def test_what_launchers_have_left_on_a_disk_is_removed_an_hour_later(tmp_path: Path) -> None:
    names = ("flk-a-0", "flk-b-0", "flk-b-1", "flk-c-0", "data")
    own, old, young, used, other = (tmp_path / name for name in names)
    for folder in (own, old, young, used, other):
        folder.mkdir()
        (folder / "0.shard").touch()
        for path in (folder / "0.shard", folder):
            os.utime(path, (time.time() - 7200,) * 2)
    os.utime(young / "0.shard")
    in_use = disk._lock(used)
    descriptor = disk.take(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "flk-a-0", "flk-b-1", "flk-c-0"]
    with pytest.raises(BlockingIOError):
        disk.take(own)
    for each in (in_use, descriptor):
        os.close(each)
