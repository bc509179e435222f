"""Shards as torch.distributed.checkpoint sees them: the base class of flk's readers, tensors in shard files, metadata.

The format of the files is in `flk_runtime.shared.shard_file`. The shards of a checkpoint together are its metadata, so
a checkpoint can be loaded at any world size from its shards alone.
"""

from __future__ import annotations

import io
import mmap
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flk_runtime.checkpoint.state import Chunk
from flk_runtime.shared.progress import heartbeat
from flk_runtime.shared.shard_file import Entry, ShardError, read_header


class ChunkReader(StorageReader):
    """The base class of flk's readers: they load item by item, at once, and keep torch's plan as it is."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def cover(self, chunks: Sequence[Chunk]) -> None:
        """Have the metadata name the chunks of the checkpoint in which ``chunks`` are, if it does not name all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            heartbeat()
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.read_bytes(item)))
            else:
                place(narrow(self.read_tensor(item), item.storage_offsets, item.lengths), item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    @abstractmethod
    def read_bytes(self, item: ReadItem) -> bytes:
        """The value of an item that is no tensor, as torch.save has written it."""

    @abstractmethod
    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        """The saved tensor in which the item's box is, on the CPU."""


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
        return torch.empty(size, dtype=kind)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=count * kind.itemsize, offset=begin)
    return raw.view(kind).view(size)


def narrow(tensor: torch.Tensor, offsets: Iterable[int], size: Iterable[int]) -> torch.Tensor:
    """The box of a tensor at ``offsets``, as a view."""
    for dimension, (offset, length) in enumerate(zip(offsets, size, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def place(box: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy the box that ``item`` reads to where ``planner`` wants it."""
    target = planner.resolve_tensor(item).detach()
    target.copy_(box)
    planner.commit_tensor(item, target)


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of this name, such as ``float32``. Raises ShardError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ShardError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def entry_index(entry: Entry) -> MetadataIndex:
    """The key of an entry in the metadata of a checkpoint."""
    return MetadataIndex(entry.name, None if entry.dtype is None else torch.Size(entry.offsets))


def merge_entries(shards: Iterable[Iterable[Entry]], storage_data: Any) -> Metadata:
    """The metadata of the checkpoint whose shards have these entries."""
    metadata = Metadata({}, planner_data={}, storage_data=storage_data)
    for entries in shards:
        add_entries(metadata, entries)
    return metadata


def add_entries(metadata: Metadata, entries: Iterable[Entry], *, chunks: bool = True) -> None:
    """Add entries of a shard to the metadata of its checkpoint; without ``chunks``, only their names and shapes."""
    tensors: dict[str, Any] = metadata.state_dict_metadata
    for entry in entries:
        metadata.planner_data[entry.name] = entry.path
        if entry.dtype is None:
            tensors[entry.name] = BytesStorageMetadata()
            continue
        if entry.name not in tensors:
            properties = TensorProperties(dtype=parse_dtype(entry.dtype))
            tensors[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
        if chunks:
            chunk = ChunkStorageMetadata(offsets=torch.Size(entry.offsets), sizes=torch.Size(entry.size))
            tensors[entry.name].chunks.append(chunk)
