"""The memory that checkpoints may take."""

from __future__ import annotations

from pathlib import Path

from flk_runtime.launcher.replication import service as room


def test_the_limit_is_what_was_wanted_or_half_of_what_there_is(tmp_path: Path) -> None:
    assert room.shards_limit(str(tmp_path), 123) == 123
    assert 0 < room.shards_limit(str(tmp_path), None) < 1 << 60
