"""The copy of a state into a shard: memory that the driver does not pin, and the devices that it waits for."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.setattr(torch, "ones", lambda *_, **__: cudart.launch())
    shard = StagedShard(tmp_path / "part", make_plan([]), {})
    assert cudart.pending == 0
    shard.close()


def test_a_save_waits_for_every_device_of_the_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script may train on another GPU than the current one, and on several; torch waits for one of them."""
    waited: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr("flk_runtime.system.torch_private.copy_all", lambda targets, sources: None)
    monkeypatch.setattr(staging, "cut", lambda tensor, write: tensor)
    chunks = [
        SimpleNamespace(tensor=SimpleNamespace(device=device, is_cpu=device == "cpu", is_cuda=False))
        for device in ("cuda:1", "cpu", "cuda:2", "cuda:1", "mps:0")
    ]
    shard: Any = StagedShard(tmp_path / "part", make_plan([]), {})
    shard.plan = SimpleNamespace(writes=[SimpleNamespace(chunk=number) for number in range(len(chunks))])
    shard.copy(chunks, b"", SimpleNamespace(step=1, number=1), 0, 1)
    assert sorted(waited) == ["cuda:1", "cuda:2", "mps:0"]
    shard.close()
