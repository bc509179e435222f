"""Pinned memory of a shard: what the driver refuses leaves no error, and nothing stays pinned that is unmapped."""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path

import pytest
import torch

from flk_runtime.checkpoint.save import staging
from flk_runtime.checkpoint.save.plan import make_plan
from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.shared.shard_file import DATA_BEGIN


class Cudart:
    """The functions of CUDA's runtime that pin memory. ``code`` is what it answers to a registration."""

    class cudaError(enum.IntEnum):
        success = 0
        hostMemoryAlreadyRegistered = 712

    def __init__(self, code: int = 0) -> None:
        self._code = self.cudaError(code)
        self.pinned: dict[int, int] = {}
        self.pending = 0  # the error that the next kernel would raise
        self.read: list[bytes] = []  # of the memory, when it was given back

    def cudaHostRegister(self, address: int, size: int, flags: int) -> object:
        if self._code:
            self.pending = self._code
        else:
            self.pinned[address] = size
        return self._code

    def cudaHostUnregister(self, address: int) -> object:
        del self.pinned[address]
        self.read.append(ctypes.string_at(address, 8))  # it must be mapped still
        return self.cudaError.success

    def launch(self) -> None:
        """Launch a kernel, which takes the pending error."""
        code, self.pending = self.pending, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


def use(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> Cudart:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(staging, "_launch", cudart.launch)
    return cudart


def test_pinned_memory_is_given_back_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cudart = use(monkeypatch, Cudart())
    shard = StagedShard(tmp_path / "part", make_plan([]), {})
    assert list(cudart.pinned.values()) == [DATA_BEGIN]
    shard.close()
    assert cudart.pinned == {}
    assert len(cudart.read) == 1


def test_memory_that_the_driver_does_not_pin_leaves_no_error_for_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cudart = use(monkeypatch, Cudart(712))
    shard = StagedShard(tmp_path / "part", make_plan([]), {})
    assert cudart.pending == 0
    shard.close()
    assert cudart.read == []
