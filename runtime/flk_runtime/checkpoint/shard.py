"""Shards as torch.distributed.checkpoint describes them: the base class of readers, tensors in shard files, metadata.

The format of the files is in `flk_runtime.shared.shard_file`. The shards of a checkpoint together are its metadata, so
a checkpoint can be loaded at any world size from its shards alone.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from flk_runtime.shared.progress import heartbeat
from flk_runtime.shared.shard_file import Entry, ShardError, read_header

Target = Callable[[ReadItem], torch.Tensor]  # where the box of an item is read to


class ChunkReader(ABC):
    """The base class of flk's readers: they read item by item, at once."""

    @abstractmethod
    def read_metadata(self) -> Metadata:
        """The names, shapes and chunks in the checkpoint. It is called before anything is read."""

    @abstractmethod
    def read_value(self, name: str) -> bytes:
        """A value that is no tensor, as torch.save has written it."""

    @abstractmethod
    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        """The saved tensor in which the item's box is, on the CPU."""

    def complete(self, *, lacks: bool) -> bool:
        """Have the metadata name all chunks, if this or another rank ``lacks`` some. Returns whether it names more."""
        return False

    def read(self, items: Sequence[ReadItem], target: Target) -> None:
        """Copy the box of each item into the tensor that ``target`` returns for it."""
        for item in items:
            heartbeat()
            target(item).copy_(narrow(self.read_tensor(item), item.storage_offsets, item.lengths))


class HeldShard:
    """A whole shard file as it can be read: the tensors as views of the mapped file, the plain values, the writer."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, and ShardError if the file is no whole shard."""
        memory = map_file(path)
        header = read_header(memory)
        *tensors, values = header.entries
        self.writer = header.metadata
        self.values = memory[values.begin : values.begin + values.length]
        self._tensors = [(each, view_tensor(memory, each.begin, each.dtype or "", each.size)) for each in tensors]

    def tensors(self) -> list[tuple[Entry, torch.Tensor]]:
        return self._tensors


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a shard file, mapped. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        # A private mapping, since torch makes tensors of memory that can be written to.
        return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(file)


def view_tensor(memory: Any, begin: int, dtype: str, size: tuple[int, ...]) -> torch.Tensor:
    """The tensor of shape ``size`` whose raw bytes are in the buffer ``memory`` from ``begin`` on, without a copy."""
    kind = parse_dtype(dtype)
    count = torch.Size(size).numel()
    if count == 0:
        return torch.empty(size, dtype=kind, device="cpu")
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=count * kind.itemsize, offset=begin)
    return raw.view(kind).view(size)


def narrow(tensor: torch.Tensor, offsets: Iterable[int], size: Iterable[int]) -> torch.Tensor:
    """The box of a tensor at ``offsets``, as a view."""
    for dimension, (offset, length) in enumerate(zip(offsets, size, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of this name, such as ``float32``. Raises ShardError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def entry_index(entry: Entry) -> MetadataIndex:
    """The key of an entry in the metadata of a checkpoint."""
    return MetadataIndex(entry.name, None if entry.dtype is None else torch.Size(entry.offsets))


def merge_entries(shards: Iterable[Iterable[Entry]], storage_data: Any = None) -> Metadata:
    """The metadata of the checkpoint whose shards have these entries."""
    metadata = Metadata({}, planner_data={}, storage_data=storage_data)
    for entries in shards:
        add_entries(metadata, entries)
    return metadata


def add_entries(metadata: Metadata, entries: Iterable[Entry]) -> None:
    """Add entries of a shard to the metadata of its checkpoint."""
    tensors: dict[str, Any] = metadata.state_dict_metadata
    for entry in entries:
        metadata.planner_data[entry.name] = entry.path
        if entry.dtype is None:
            tensors[entry.name] = BytesStorageMetadata()
            continue
        if entry.name not in tensors:
            tensors[entry.name] = TensorStorageMetadata(
                TensorProperties(dtype=parse_dtype(entry.dtype)), torch.Size(entry.shape), []
            )
        tensors[entry.name].chunks.append(
            ChunkStorageMetadata(offsets=torch.Size(entry.offsets), sizes=torch.Size(entry.size))
        )
