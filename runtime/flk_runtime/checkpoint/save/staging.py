"""Staging: this rank's chunks are copied into its shard file in memory. Only this copy stops the training."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from flk_runtime.checkpoint.save.plan import Plan, cut
from flk_runtime.checkpoint.shard import view_tensor
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.shared.memory_messages import SaveKey
from flk_runtime.shared.shard_file import Entry, ShardFile, ShardHeader, shard_size
from flk_runtime.system import torch_private


class StagedShard:
    """One copy of this rank's shard of a checkpoint: `copy` fills it, and then it can be read."""

    def __init__(self, path: FilePath | None, plan: Plan, metadata: Mapping[str, Any]) -> None:
        """``path``: a file in tmpfs; None: memory of this process. Raises OSError if there is no room."""
        self.path = path
        self.plan, self.writer = plan, metadata
        self.values = b""
        """The plain values of the copy."""
        self._file = ShardFile(path, plan.entries, metadata)
        self._views = [view_tensor(self._file.memory, e.begin, e.dtype or "", e.size) for e in plan.entries]
        self._pinned: int | None = None  # the address
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._pinned = _pin(self._file.memory)

    def copy(self, chunks: Sequence[Chunk], values: bytes, save: SaveKey, rank: int, world_size: int) -> ShardHeader:
        """Copy this rank's writes out of ``chunks``, and plain ``values``. Returns when the device has copied them.

        Raises OSError if there is no room for the values.
        """
        self._file.begin()
        sources = [cut(chunks[write.chunk].tensor, write) for write in self.plan.writes]
        if sources:
            torch_private.copy_all(self._views, sources)
        for device in {source.device for source in sources if not source.is_cpu}:
            torch.accelerator.synchronize(device)  # not the current one alone
        self.values = values
        return self._file.finish(step=save.step, number=save.number, world_size=world_size, rank=rank, values=values)

    def tensors(self) -> list[tuple[Entry, torch.Tensor]]:
        """The tensors of the shard, as views of its memory."""
        return list(zip(self.plan.entries, self._views, strict=True))

    def close(self) -> None:
        if self._pinned is not None:  # before it is unmapped: another mapping may get the address
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None
        self._views = []
        self._file.close()


class Staging:
    """The copies of this rank's shard of one structure, each in a file that is used for many saves."""

    def __init__(self, plan: Plan, metadata: Mapping[str, Any], layout: Sequence[Any]) -> None:
        """``metadata`` describes the writer of the shards, and ``layout`` the chunks of which the plan was made."""
        self.plan, self._metadata, self.layout = plan, metadata, layout
        self._shards: dict[FilePath | None, StagedShard] = {}
        self._size = shard_size(plan.entries, metadata)

    def size(self, values: int) -> int:
        """The bytes of a shard with ``values`` bytes of plain values."""
        return self._size + values

    def shard(self, path: FilePath | None) -> StagedShard:
        """The copy in a file in tmpfs, or in memory of this process (None). Raises OSError as `StagedShard`."""
        if path not in self._shards:
            self._shards[path] = StagedShard(path, self.plan, self._metadata)
        return self._shards[path]

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards = {}


def _pin(memory: mmap.mmap) -> int | None:
    """Lock the memory so that the device copies to it directly, and return its address.

    None: the driver refuses, and copies are slower.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if cudart.cudaHostRegister(address, len(memory), 0) == cudart.cudaError.success:
        return address
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")  # the refusal is pending until a kernel is launched, which would raise it later
    return None
