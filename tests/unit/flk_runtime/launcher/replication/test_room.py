"""The file system in which checkpoints in memory are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flk_runtime.launcher.replication import service as room

MOUNTS = """\
overlay / overlay rw 0 0
tmpfs /dev tmpfs rw 0 0
shm /dev/shm tmpfs rw 0 0
/dev/vda /dev/shm/disk ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "point", "in_memory"),
    [
        ("/dev/shm/flk-run-x/pods", "/dev/shm", True),
        ("/dev/shm", "/dev/shm", True),
        ("/dev/shmoo", "/dev", True),
        ("/dev/shm/disk/shards", "/dev/shm/disk", False),
        ("/var/shards", "/", False),
    ],
)
def test_mount_point_of_a_folder(tmp_path: Path, folder: str, point: str, in_memory: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert room.mount_point(folder, mounts) == point
    assert room.is_in_memory(folder, mounts) == in_memory


def test_a_folder_without_known_mounts_is_not_taken_for_memory(tmp_path: Path) -> None:
    assert room.mount_point("/shards", tmp_path / "missing") == "/shards"
    assert not room.is_in_memory("/shards", tmp_path / "missing")


def test_the_limit_is_what_was_wanted_or_half_of_what_there_is(tmp_path: Path) -> None:
    assert room.shards_limit(str(tmp_path), 123) == 123
    assert 0 < room.shards_limit(str(tmp_path), None) < 1 << 60


def test_the_limit_on_a_disk_is_half_of_what_is_free_or_was_used_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left").write_bytes(bytes(1 << 20))
    os.sync()  # it has its blocks
    free, left = os.statvfs(tmp_path), (tmp_path / "left").stat().st_blocks << 9
    fixed = os.statvfs_result((*free[:4], 4096, *free[5:]))  # blocks that are free to this user
    monkeypatch.setattr(os, "statvfs", lambda folder: fixed)
    whole = 4096 * free.f_frsize + left
    assert room.disk_limit(tmp_path, 123, 1) == 123
    assert room.disk_limit(tmp_path, None, 0) == whole // 2
    assert room.disk_limit(tmp_path, None, 1000) == 500, "a pod that takes more of its node's disk is evicted"
    assert room.disk_limit(tmp_path, None, 1 << 60) == whole // 2


def test_what_launchers_have_left_on_a_disk_is_removed_an_hour_later(tmp_path: Path) -> None:
    names = ("flk-a-0", "flk-b-0", "flk-b-1", "flk-c-0", "data")
    own, old, young, used, other = (tmp_path / name for name in names)
    for folder in (own, old, young, used, other):
        folder.mkdir()
        (folder / "0.shard").touch()
        for path in (folder / "0.shard", folder):
            os.utime(path, (time.time() - 7200,) * 2)
    os.utime(young / "0.shard")
    in_use = room._lock(used)
    descriptor = room.take_folder(own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "flk-a-0", "flk-b-1", "flk-c-0"]
    with pytest.raises(BlockingIOError):
        room.take_folder(own)
    for each in (in_use, descriptor):
        os.close(each)
