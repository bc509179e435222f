"""Pinned memory of a shard: what the driver refuses leaves no error."""

from __future__ import annotations

import enum
from pathlib import Path

import pytest
import torch

from flk_runtime.checkpoint.save import staging
from flk_runtime.checkpoint.save.plan import make_plan
from flk_runtime.checkpoint.save.staging import StagedShard


class Cudart:
    """A CUDA runtime that pins no memory."""

    class cudaError(enum.IntEnum):
        success = 0
        hostMemoryAlreadyRegistered = 712

    def __init__(self) -> None:
        self.pending = 0  # the error that the next kernel would raise

    def cudaHostRegister(self, address: int, size: int, flags: int) -> object:
        self.pending = self.cudaError.hostMemoryAlreadyRegistered
        return self.pending

    def launch(self) -> None:
        """Launch a kernel, which takes the pending error."""
        code, self.pending = self.pending, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


def test_memory_that_the_driver_does_not_pin_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(staging, "_launch", cudart.launch)
    shard = StagedShard(tmp_path / "part", make_plan([]), {})
    assert cudart.pending == 0
    shard.close()
