"""Saves in the memory of pods that grow beyond what there is room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flk_runtime.checkpoint.memory import PodMemory
from flk_runtime.checkpoint.save import Retention, Saver
from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.errors import StorageError


class Memory:
    """The memory of a pod with room for shards of ``limit`` bytes, which holds what is finished."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self._limit = path, limit
        self.size, self.refusal = 0, ""

    def reserve(self, sizes: dict[int, int]) -> str:
        size = max(sizes.values())
        if size > self._limit:
            return f"{size} bytes are too much"
        self.size = size
        return ""

    def finish(self, save: Any) -> None:
        self.refusal = ""

    def skip(self, why: str) -> None:
        self.refusal = why

    def is_held(self, *, wait: bool) -> bool:
        return not self.refusal

    def settle(self, *, whole: bool) -> None:
        pass


def test_a_state_that_outgrows_the_memory_is_not_copied_where_nothing_would_read_the_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies, copy = [], StagedShard.copy

    def counted(shard: StagedShard, *arguments: Any, **named: Any) -> Any:
        copies.append(shard.path)
        return copy(shard, *arguments, **named)

    monkeypatch.setattr(StagedShard, "copy", counted)
    memory, lines, saved = Memory(tmp_path / "part", 1 << 18), [], []  # type: ignore[var-annotated]
    saver = Saver(
        None,
        cast(PodMemory, memory),
        retention=Retention(),
        metadata={},
        timeout=60.0,
        on_saved=saved.append,
        warn=lines.append,
    )
    chunks = chunks_of(("model", "weight"), torch.ones(8))
    saver.save(1, chunks, {"log": ""})
    for step in (2, 3):
        saver.save(step, chunks, {"log": "x" * (1 << 18)})
    assert copies == [tmp_path / "part"]
    with pytest.raises(StorageError, match=r"after step 3 is not in memory: \d+ bytes are too much"):
        saver.wait()
    assert saved == [1]
    assert len(lines) == 1
    assert "after step 2 is not in memory" in lines[0]
    saver.save(4, chunks, {"log": ""})
    saver.wait()
    assert saved == [1, 4]
    assert len(copies) == 2
