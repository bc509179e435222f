"""The file system in which checkpoints in memory are."""

from __future__ import annotations

from pathlib import Path

import pytest

from flk_runtime.launcher.replication import room

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
    assert room.limit(str(tmp_path), 123) == 123
    assert 0 < room.limit(str(tmp_path), None) < 1 << 60
