"""Staging: this rank's pieces are copied into its part file in memory. Only this copy stops the training."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from flk_runtime.checkpoint.part import view_tensor
from flk_runtime.checkpoint.save.plan import Plan, cut
from flk_runtime.checkpoint.state import Piece
from flk_runtime.system.part import Entry, PartFile, PartHeader, align


class StagedPart:
    """One copy of this rank's share of a checkpoint: `copy` fills it, `finish` makes it whole, `read` reads it."""

    def __init__(self, path: FilePath | None, plan: Plan) -> None:
        """``path``: a file in tmpfs; None: memory of this process. Raises OSError if there is no room."""
        self.path = path
        self.plan = plan
        self.file = PartFile(path, plan.size)
        self._views = [view_tensor(self.file.memory, e.begin, e.dtype or "", e.size) for e in plan.entries]
        self._entries: list[Entry] = []
        self.step = -1
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _pin(self.file.memory)

    def copy(self, pieces: Sequence[Piece], values: Mapping[str, bytes]) -> None:
        """Copy this rank's writes out of ``pieces``, and plain ``values`` by name. The device has done it at return."""
        self.file.begin()
        on_device = False
        for view, write in zip(self._views, self.plan.writes, strict=True):
            tensor = pieces[write.piece].tensor
            view.copy_(cut(tensor, write), non_blocking=True)
            on_device |= tensor.is_cuda
        if on_device:
            torch.cuda.synchronize()
        self._entries = list(self.plan.entries)
        position = self.plan.size
        for name, value in values.items():
            self.file.append(position, value)
            self._entries.append(Entry(name, (name,), position, len(value)))
            position = align(position + len(value))

    def finish(self, step: int, world_size: int, rank: int, metadata: Mapping[str, Any]) -> PartHeader:
        """Compute the checksum and write the header. Training may go on meanwhile."""
        self.step = step
        return self.file.finish(step=step, world_size=world_size, rank=rank, entries=self._entries, metadata=metadata)

    def tensors(self) -> list[tuple[Entry, torch.Tensor]]:
        """The tensors of the part, as views of its memory."""
        return list(zip(self.plan.entries, self._views, strict=True))

    def close(self) -> None:
        self._views = []
        self.file.close()


class Staging:
    """The copies of this rank's share of one structure, each in a file that is used again and again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._parts: dict[FilePath | None, StagedPart] = {}

    def part(self, path: FilePath | None) -> StagedPart:
        """The copy in a file in tmpfs, or in memory of this process (None). Raises OSError as `StagedPart`."""
        if path not in self._parts:
            self._parts[path] = StagedPart(path, self.plan)
        return self._parts[path]

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        self._parts = {}


def _pin(memory: mmap.mmap) -> None:
    """Lock the memory so that the device copies to it directly. Where the driver refuses, copies are slower."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)  # type: ignore[no-untyped-call]
