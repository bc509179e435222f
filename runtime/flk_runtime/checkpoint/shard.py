"""ShardsReader: reads tensors and values out of the shard files of a checkpoint, for torch.distributed.checkpoint.load.

The format of the files is in `flk_runtime.shared.shard_file`. The shards of a checkpoint together are its metadata, so
a checkpoint can be loaded at any world size from its shards alone.
"""

from __future__ import annotations

import io
import mmap
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
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

from flk_runtime.shared.shard_file import Entry, ShardError, ShardHeader


class ChunkReader(StorageReader):
    """The base class of flk's readers: they load item by item, at once, and keep torch's plan as it is."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.read_bytes(item)))
            else:
                copy_piece(self.read_tensor(item), item, planner)
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


class ShardsReader(ChunkReader):
    """Reads a checkpoint whose shards are files. Each shard is opened when its data is needed first.

    ``headers`` are the headers of all shards, in any order. ``open_shard(rank)`` returns the path of the shard that
    this rank wrote, a whole and undamaged file on this machine; it may fetch the file first. Raises ShardError if the
    shards are not all shards of one whole checkpoint.
    """

    def __init__(self, headers: Iterable[ShardHeader], open_shard: Callable[[int], Path]) -> None:
        self.headers = sorted(headers, key=lambda header: header.rank)
        _check_complete(self.headers)
        self._open_shard = open_shard
        self._mapped: dict[int, mmap.mmap] = {}  # by the rank that wrote the shard
        self._entries: dict[MetadataIndex, tuple[int, Entry]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the whole checkpoint. ``planner_data`` maps each name to its path in the nested state."""
        self._entries = {
            entry_index(entry): (header.rank, entry) for header in self.headers for entry in header.entries
        }
        return merge_entries((header.entries for header in self.headers), self._entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._entries = metadata.storage_data

    def read_bytes(self, item: ReadItem) -> bytes:
        rank, entry = self._entries[item.storage_index]
        return self._map(rank)[entry.begin : entry.begin + entry.length]

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        rank, entry = self._entries[item.storage_index]
        return view_tensor(self._map(rank), entry.begin, entry.dtype or "", entry.size)

    def _map(self, rank: int) -> mmap.mmap:
        if rank not in self._mapped:
            file = os.open(self._open_shard(rank), os.O_RDONLY)
            try:
                # A private mapping, since torch makes tensors of memory that can be written to.
                self._mapped[rank] = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE)
            finally:
                os.close(file)
        return self._mapped[rank]


def view_tensor(memory: Any, begin: int, dtype: str, size: tuple[int, ...]) -> torch.Tensor:
    """The tensor of shape ``size`` whose raw bytes are in the buffer ``memory`` from ``begin`` on, without a copy."""
    kind = parse_dtype(dtype)
    count = torch.Size(size).numel()
    if count == 0:
        return torch.empty(size, dtype=kind)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=count * kind.itemsize, offset=begin)
    return raw.view(kind).view(size)


def copy_piece(saved: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copy the box of ``saved`` that ``item`` reads to where ``planner`` wants it."""
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(saved)
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
    tensors: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for entries in shards:
        for entry in entries:
            paths[entry.name] = entry.path
            if entry.dtype is None:
                tensors[entry.name] = BytesStorageMetadata()
                continue
            if entry.name not in tensors:
                properties = TensorProperties(dtype=parse_dtype(entry.dtype))
                tensors[entry.name] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
            chunk = ChunkStorageMetadata(offsets=torch.Size(entry.offsets), sizes=torch.Size(entry.size))
            tensors[entry.name].chunks.append(chunk)
    return Metadata(tensors, planner_data=paths, storage_data=storage_data)


def _check_complete(headers: list[ShardHeader]) -> None:
    if not headers:
        raise ShardError("there are no parts")
    steps = {header.step for header in headers}
    if len(steps) > 1:
        raise ShardError(f"the parts are of different steps: {', '.join(map(str, sorted(steps)))}")
    world_size = headers[0].world_size
    if [header.rank for header in headers] != list(range(world_size)):
        raise ShardError(f"{len(headers)} parts of a checkpoint that has {world_size}, or a part twice")
