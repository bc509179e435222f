"""PodReader: reads a checkpoint in the memory of the pods, whose shards are spread over the ranks.

Each rank opens the shards that it is the reader of: its own one if as many ranks have saved. What it needs from other
shards comes over the process group, in buckets: tensors that all ranks read whole, as under DDP, by broadcasts, and
other boxes by all-to-all exchanges between the ranks that have them and the ranks that need them. Where each rank reads
what it has written itself, as under FSDP, no values travel, and of the headers that of rank 0, which names the tensors
that are not sharded.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from flk_runtime.checkpoint.shard import ChunkReader, add_entries, entry_index, narrow, place, view_tensor
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.distributed import process_group
from flk_runtime.shared.progress import heartbeat
from flk_runtime.shared.shard_file import Entry, ShardHeader, read_header, value_name

_BUCKET: Final = 32 << 20  # bytes that a rank sends or receives at once
_SAMPLE: Final = 16  # entries
_ALIGNMENT: Final = 16  # bytes of the largest dtype
_CPU: Final = torch.device("cpu")

T = TypeVar("T")
_Box = list[Any]  # of a shard's chunk: name and offsets of the chunk, offsets in the chunk, and size; as JSON


class _Unread(NamedTuple):
    """The header of a shard as it travels."""

    text: bytes  # compressed JSON
    sample: tuple[Entry, ...]  # some of its entries

    @classmethod
    def of(cls, header: ShardHeader) -> _Unread:
        tensors = [entry for entry in header.entries if entry.dtype]
        return cls(zlib.compress(header.to_json(), 1), tuple(tensors[:: max(1, len(tensors) // _SAMPLE)]))

    def header(self) -> ShardHeader:
        return ShardHeader.from_json(zlib.decompress(self.text))

    def has_piece_of(self, chunks: Sequence[Chunk]) -> bool:
        wanted = {chunk.name: chunk for chunk in chunks}
        return any(
            entry.name in wanted and _overlap(wanted[entry.name], entry.offsets, entry.size) for entry in self.sample
        )


class PodReader(ChunkReader):
    """Reads a checkpoint whose shards the ranks hold. The constructor, `cover` and `read_data` are collective."""

    def __init__(self, readers: Sequence[int], open_shard: Callable[[int], Path]) -> None:
        """``readers`` are the ranks that open each shard, by the rank that wrote it.

        ``open_shard(rank)`` returns the path of the shard that this rank wrote, a whole and undamaged file.
        """
        self.received = 0
        """Bytes of tensors that this rank has got from other ranks."""
        self._rank, self._readers = process_group.rank(), readers
        self._mapped: dict[int, mmap.mmap] = {}  # the shards that this rank reads, by the rank that wrote them
        self._headers: dict[int, ShardHeader] = {}
        self._values: dict[str, bytes] = {}  # plain values that this rank may need, by name
        for shard, reader in enumerate(readers):
            if reader == self._rank:
                self._mapped[shard] = memory = _map(open_shard(shard))
                self._headers[shard] = header = read_header(memory)
                (entry,) = (entry for entry in header.entries if entry.dtype is None)
                self._values[entry.name] = memory[entry.begin : entry.begin + entry.length]
        self._entries: dict[MetadataIndex, tuple[int, Entry]] = {}
        self._metadata: Any = Metadata({}, planner_data={})
        self._device = _CPU  # on which values travel
        self._others: dict[int, _Unread] = {}  # headers of further shards
        self._gathered = False  # this rank has, or had, all of them there
        self._share_names()
        if len(readers) != process_group.world_size():
            for values in process_group.all_gather(self._values):
                self._values |= values
            self._gather_headers()
        self._add(self._headers)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the whole checkpoint, with the chunks that `cover` was called for."""
        metadata: Metadata = self._metadata
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def cover(self, chunks: Sequence[Chunk]) -> None:
        lacking = [chunk for chunk in chunks if not self._covers(chunk)]
        if not self._gathered and process_group.maximum(len(lacking))[0]:
            self._gather_headers()
        for certain in (True, False):  # first the headers of shards that have a piece of these chunks for certain
            if not lacking:
                return
            found = [shard for shard, other in self._others.items() if not certain or other.has_piece_of(lacking)]
            for shard in found:
                self._headers[shard] = self._others.pop(shard).header()
            self._add(self._headers)
            lacking = [chunk for chunk in lacking if not self._covers(chunk)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan, and send other ranks what they need for theirs."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        remote = [item for item in tensors if self._shard_of(item) not in self._mapped]
        remote_anywhere, without_device = process_group.maximum(
            len(remote),
            int(not torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        )
        if remote_anywhere:
            # On the device, the values travel between the devices.
            self._device = process_group.comm_device(_CPU if without_device else torch.device("cuda"))
            common = self._read_by_all(tensors)
            self._broadcast([item for item in tensors if item.storage_index.fqn in common], planner)
            self._exchange([item for item in remote if item.storage_index.fqn not in common], planner)
        gone = set(map(id, remote))
        return super().read_data(LoadPlan([item for item in plan.items if id(item) not in gone]), planner)

    def read_bytes(self, item: ReadItem) -> bytes:
        return self._values[item.storage_index.fqn]

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._chunk(item.storage_index)

    # Metadata ----------------------------------------------------------------------------------------------------

    def _share_names(self) -> None:
        """Have the metadata name all tensors, and take the header and the plain values of the shard of rank 0."""
        known: set[str] = set()
        if self._readers[0] == 0:
            first = process_group.on_main(lambda: (self._headers[0].to_json(), self._values[value_name(0)]))
            self._headers[0], self._values[value_name(0)] = ShardHeader.from_json(first[0]), first[1]
            known = {entry.name for entry in self._headers[0].entries}
        own = [entry for header in self._headers.values() for entry in header.entries]
        add_entries(self._metadata, own, chunks=False)
        for more in process_group.all_gather({entry.name: entry for entry in own if entry.name not in known}):
            add_entries(self._metadata, more.values(), chunks=False)

    def _gather_headers(self) -> None:
        """Have every rank hold the headers of all shards, unread: those of a sharded model have many entries."""
        own = {shard: _Unread.of(header) for shard, header in self._headers.items() if shard in self._mapped}
        for headers in process_group.all_gather(own):
            self._others |= {shard: header for shard, header in headers.items() if shard not in self._headers}
        self._gathered = True

    def _add(self, headers: dict[int, ShardHeader]) -> None:
        """Have the metadata name the chunks of these shards, in the same order on all ranks."""
        for found in self._metadata.state_dict_metadata.values():
            if _is_tensor(found):
                found.chunks.clear()
        for shard, header in sorted(headers.items()):
            add_entries(self._metadata, header.entries)
            self._entries |= {entry_index(entry): (shard, entry) for entry in header.entries}

    def _covers(self, chunk: Chunk) -> bool:
        found = self._metadata.state_dict_metadata.get(chunk.name)
        if not _is_tensor(found):
            return True  # the planner says that it is not in the checkpoint
        here = sum(_overlap(chunk, each.offsets, each.sizes) for each in found.chunks)
        return here == chunk.tensor.numel()

    def _shard_of(self, item: ReadItem) -> int:
        return self._entries[item.storage_index][0]

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        shard, entry = self._entries[index]
        return view_tensor(self._mapped[shard], entry.begin, entry.dtype or "", entry.size)

    # Values of other ranks ---------------------------------------------------------------------------------------

    def _read_by_all(self, items: Sequence[ReadItem]) -> set[str]:
        """The names of the tensors that all ranks read whole."""
        read: dict[str, int] = {}  # elements
        for item in items:
            read[item.storage_index.fqn] = read.get(item.storage_index.fqn, 0) + item.lengths.numel()
        names = sorted(name for name, found in self._metadata.state_dict_metadata.items() if _is_tensor(found))
        whole = [read.get(name) == self._metadata.state_dict_metadata[name].size.numel() for name in names]
        flags = torch.tensor(whole, dtype=torch.uint8, device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}

    def _broadcast(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read items that are the same on all ranks. A rank copies what it has itself in `read_data`."""
        by_reader: dict[int, list[ReadItem]] = {}
        for item in sorted(items, key=_box):
            by_reader.setdefault(self._readers[self._shard_of(item)], []).append(item)
        for reader, found in sorted(by_reader.items()):
            for begin, end in _buckets([self._size(item) for item in found], _BUCKET):
                bucket = found[begin:end]
                data = torch.empty(sum(map(self._size, bucket)), dtype=torch.uint8, device=self._device)
                if reader == self._rank:
                    self._pack(map(_box, bucket), data)
                dist.broadcast(data, src=reader)
                if reader != self._rank:
                    self._unpack(bucket, data, planner)
                heartbeat()

    def _exchange(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read items of other ranks' shards, and send other ranks what they read of this rank's."""
        if not process_group.maximum(len(items))[0]:
            return
        device, ranks = self._device, process_group.world_size()
        wanted: list[list[ReadItem]] = [[] for _ in range(ranks)]  # by the rank that has them
        for item in items:
            wanted[self._readers[self._shard_of(item)]].append(item)
        asked: list[list[_Box]] = _swap([[_box(item) for item in each] for each in wanted], device)
        limit = _BUCKET // ranks
        receives = [_buckets([self._size(item) for item in each], limit) for each in wanted]
        sends = [_buckets([self._box_size(box) for box in each], limit) for each in asked]
        (rounds,) = process_group.maximum(max(map(len, receives)))
        for number in range(rounds):
            got = [_bucket(each, cuts, number) for each, cuts in zip(wanted, receives, strict=True)]
            given = [_bucket(each, cuts, number) for each, cuts in zip(asked, sends, strict=True)]
            lengths = [sum(map(self._size, each)) for each in got]
            sent = [sum(map(self._box_size, each)) for each in given]
            packed = torch.empty(sum(sent), dtype=torch.uint8, device=device)
            self._pack((box for each in given for box in each), packed)
            data = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
            dist.all_to_all_single(data, packed, lengths, sent)
            self._unpack([item for each in got for item in each], data, planner)
            heartbeat()

    def _size(self, item: ReadItem) -> int:
        return self._box_size(_box(item))

    def _box_size(self, box: _Box) -> int:
        """Bytes of a box in a bucket."""
        name, _, _, size = box
        length = torch.Size(size).numel() * self._dtype(name).itemsize
        return -(-length // _ALIGNMENT) * _ALIGNMENT

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._metadata.state_dict_metadata[name].properties.dtype
        return dtype

    def _pack(self, boxes: Iterable[_Box], data: torch.Tensor) -> None:
        position = 0
        for box in boxes:
            name, chunk, offsets, size = box
            values = narrow(self._chunk(MetadataIndex(name, torch.Size(chunk))), offsets, size).contiguous()
            raw = values.view(-1).view(torch.uint8)
            data[position : position + len(raw)].copy_(raw)
            position += self._box_size(box)

    def _unpack(self, items: Iterable[ReadItem], data: torch.Tensor, planner: LoadPlanner) -> None:
        position = 0
        for item in items:
            dtype = self._dtype(item.storage_index.fqn)
            length = item.lengths.numel() * dtype.itemsize
            place(data[position : position + length].view(dtype).view(item.lengths), item, planner)
            position += self._size(item)
            self.received += length


def _is_tensor(found: Any) -> bool:
    return isinstance(found, TensorStorageMetadata)


def _box(item: ReadItem) -> _Box:
    offsets = item.storage_index.offset or ()
    return [item.storage_index.fqn, list(offsets), list(item.storage_offsets), list(item.lengths)]


def _overlap(chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of elements of ``chunk`` that are in the box at ``offsets``."""
    count = 1
    for begin, length, other, size in zip(chunk.offsets, chunk.tensor.shape, offsets, sizes, strict=True):
        count *= max(0, min(begin + length, other + size) - max(begin, other))
    return count


def _buckets(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Begin and end of each bucket, of at most ``limit`` bytes or one item."""
    cuts, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > limit:
            cuts.append((begin, index))
            begin, total = index, 0
        total += size
    return [*cuts, (begin, len(sizes))] if sizes else []


def _bucket(items: list[T], cuts: Sequence[tuple[int, int]], number: int) -> list[T]:
    """The items in a bucket; none if there are fewer buckets."""
    begin, end = cuts[number] if number < len(cuts) else (0, 0)
    return items[begin:end]


def _swap(values: Sequence[Any], device: torch.device) -> list[Any]:
    """Give each rank its element of ``values``, and return what the ranks give this one. Collective; as JSON."""
    given = [zlib.compress(json.dumps(value).encode(), 1) for value in values]
    sent = torch.tensor([len(each) for each in given], device=device)
    lengths = torch.empty_like(sent)
    dist.all_to_all_single(lengths, sent)
    data = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=device)
    packed = torch.frombuffer(bytearray(b"".join(given)), dtype=torch.uint8).to(device)
    dist.all_to_all_single(data, packed, lengths.tolist(), sent.tolist())
    pieces: Iterator[torch.Tensor] = iter(torch.split(data.cpu(), lengths.tolist()))
    return [json.loads(zlib.decompress(piece.numpy().tobytes())) for piece in pieces]


def _map(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDONLY)
    try:
        # A private mapping, since torch makes tensors of memory that can be written to.
        return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE)
    finally:
        os.close(file)
