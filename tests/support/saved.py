"""The state of an object as a checkpoint has it, in memory: what was saved is restored without files and ranks."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flk_runtime.checkpoint import Chunk, DistributedStateful
from flk_runtime.checkpoint.load import SavedObject
from flk_runtime.checkpoint.state import split_tensors
from flk_runtime.checkpoint.values import Path


class Held:
    """Stands for `SavedCheckpoint`: the tensors of one rank."""

    place = "memory"

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.saved_tensors: dict[str, torch.Tensor] = {}
        self._paths: dict[str, Path] = {}
        self.add(chunks)

    def add(self, chunks: Sequence[Chunk]) -> None:
        self.saved_tensors |= {chunk.name: chunk.tensor.clone() for chunk in chunks}
        self._paths |= {chunk.name: chunk.path for chunk in chunks}

    def names(self, prefix: Path = ()) -> Iterator[tuple[str, Path]]:
        return ((name, path) for name, path in self._paths.items() if path[: len(prefix)] == prefix)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.saved_tensors[name].shape) if name in self.saved_tensors else None

    def dtype(self, name: str) -> torch.dtype:
        return self.saved_tensors[name].dtype

    def empty(self, name: str) -> torch.Tensor:
        return torch.empty_like(self.saved_tensors[name])

    def read(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            chunk.tensor.copy_(self.saved_tensors[chunk.name])

    def tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self.saved_tensors[name].clone() for name in names}


def saved(name: str, thing: DistributedStateful) -> SavedObject:
    """The state of ``thing``, as it is saved under ``name`` and read back."""
    state = thing.save_state(name)
    beside = split_tensors(state.plain, (name,))
    checkpoint: Any = Held([*state.chunks, *beside.chunks])
    return SavedObject(checkpoint, name, read_back(beside.plain))


def read_back(plain: Any) -> Any:
    """Plain values as a checkpoint's file returns them."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
