"""PodReader: reads a checkpoint in the memory of the pods, whose shards are spread over the ranks.

Each rank opens the shards that it is the reader of: its own one if as many ranks have saved. It reads what it needs of
other shards in its pod from their files, also of shards that another pod reads and of which this one holds a copy. What
its pod lacks comes from the ranks that read it, in pieces. Where each rank reads what it has written itself, as under
FSDP, only the headers travel, and the plain values of rank 0.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from flk_runtime.checkpoint.shard import (
    ChunkReader,
    Target,
    entry_index,
    map_file,
    merge_entries,
    narrow,
    parse_dtype,
    view_tensor,
)
from flk_runtime.distributed import process_group
from flk_runtime.errors import StorageError
from flk_runtime.shared.progress import heartbeat
from flk_runtime.shared.shard_file import Entry, read_header, value_name

PIECE = 4 << 20  # bytes that a rank receives of another one in a turn, and sends to another one
_CPU: Final = torch.device("cpu")

_Box = tuple[str, torch.Size, torch.Size, torch.Size]  # name and offsets of a chunk, offsets in the chunk, and size


class PodReader(ChunkReader):
    """Reads a checkpoint whose shards the ranks hold. The constructor and `read` are collective."""

    def __init__(
        self,
        readers: Sequence[int],
        open_shard: Callable[[int], Path],
        processes: int = 1,
        copies: Collection[int] = (),
    ) -> None:
        """``readers`` are the ranks that open each shard, by the rank that wrote it.

        ``open_shard(rank)`` returns the path of the shard that this rank wrote, a whole and undamaged file; the
        ``processes`` ranks of one pod can open the same ones. ``copies`` are shards that other pods read and that this
        pod may hold too: for one that it does not, ``open_shard`` raises StorageError.
        """
        self._rank, self._readers, self._open_shard = process_group.rank(), readers, open_shard
        first = self._rank // processes * processes
        self._near, self._copies = range(first, first + processes), copies
        self.received = 0
        """Bytes of tensors that this rank has received of other pods."""
        self._mapped: dict[int, mmap.mmap] = {}  # shards in this pod, by the rank that wrote them
        self._entries: dict[MetadataIndex, tuple[int, Entry]] = {}
        own = {
            shard: read_header(self._memory(shard)).entries
            for shard, reader in enumerate(readers)
            if reader == self._rank
        }
        found: dict[int, tuple[Entry, ...]] = {}
        for held in process_group.all_gather(own):
            found |= held
        shards = sorted(found.items())  # in the same order on all ranks
        for shard, entries in shards:
            self._entries |= {entry_index(entry): (shard, entry) for entry in entries}
        self._metadata = merge_entries(entries for _, entries in shards)
        self._values = {value_name(shard): self._value(shard) for shard in own}  # plain values that this rank may need
        if len(readers) == process_group.world_size():  # each rank reads its own
            self._values |= process_group.on_main(lambda: {value_name(0): self._value(0)})
        else:
            for values in process_group.all_gather(self._values):
                self._values |= values

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read(self, items: Sequence[ReadItem], target: Target) -> None:
        """Read the items of this rank, and give other pods what they need for theirs."""
        here = self._open_copies({self._shard_of(item) for item in items})
        remote = [item for item in items if not (self._is_near(item) or self._shard_of(item) in here)]
        remote_anywhere, without_device = process_group.maximum(
            len(remote),
            int(not torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        )
        if remote_anywhere:
            # On the device, the values travel between the devices.
            device = process_group.comm_device(_CPU if without_device else torch.device("cuda"))
            self._exchange(remote, target, device)
        gone = set(map(id, remote))
        super().read([item for item in items if id(item) not in gone], target)

    def read_value(self, name: str) -> bytes:
        return self._values[name]

    def read_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._chunk(item.storage_index)

    def _value(self, shard: int) -> bytes:
        """The plain values of a shard that this rank reads."""
        _, entry = self._entries[MetadataIndex(value_name(shard))]
        return self._memory(shard)[entry.begin : entry.begin + entry.length]

    def _shard_of(self, item: ReadItem) -> int:
        return self._entries[item.storage_index][0]

    def _is_near(self, item: ReadItem) -> bool:
        """Whether this pod holds the item's shard."""
        return self._readers[self._shard_of(item)] in self._near

    def _open_copies(self, shards: set[int]) -> set[int]:
        """Those of the shards of which this pod holds a copy now. A later save may take its memory."""
        here = set()
        for shard in shards.intersection(self._copies):
            with contextlib.suppress(StorageError):
                path = self._open_shard(shard)
                if shard not in self._mapped:
                    self._mapped[shard] = map_file(path)
                here.add(shard)
        return here

    def _memory(self, shard: int) -> mmap.mmap:
        """A shard that this pod holds."""
        if shard not in self._mapped:
            self._mapped[shard] = map_file(self._open_shard(shard))
        return self._mapped[shard]

    def _chunk(self, index: MetadataIndex) -> torch.Tensor:
        shard, entry = self._entries[index]
        return view_tensor(self._memory(shard), entry.begin, entry.dtype or "", entry.size)

    # Values of other pods ----------------------------------------------------------------------------------------

    def _exchange(self, items: Sequence[ReadItem], target: Target, device: torch.device) -> None:
        """Read items of shards in other pods, and give other ranks what they read of this rank's shards.

        In each turn a rank receives a piece of the rank that is so many before it, and sends one to the rank after it.
        """
        lacking: dict[int, list[ReadItem]] = {}  # by the rank that has them
        for item in items:
            lacking.setdefault(self._readers[self._shard_of(item)], []).append(item)
        wanted = {rank: list(_buckets(found, self._itemsize)) for rank, found in lacking.items()}
        boxes = {rank: [list(map(_box, bucket)) for bucket in buckets] for rank, buckets in wanted.items()}
        boxes_of_ranks = process_group.all_gather(boxes)
        asked = {rank: of[self._rank] for rank, of in enumerate(boxes_of_ranks) if self._rank in of}
        size = process_group.world_size()
        arriving = {
            ((self._rank - rank) % size, number): (rank, bucket)
            for rank, buckets in wanted.items()
            for number, bucket in enumerate(buckets)
        }
        leaving = {
            ((rank - self._rank) % size, number): (rank, bucket)
            for rank, buckets in asked.items()
            for number, bucket in enumerate(buckets)
        }
        for turn in sorted({*arriving, *leaving}):
            sender, bucket = arriving.get(turn, (self._rank, []))
            receiver, given = leaving.get(turn, (self._rank, []))
            data = [torch.empty(item.lengths, dtype=self._dtype(item), device=device) for item in bucket]
            sent = [self._box_of(box).to(device) for box in given]
            _transfer([(receiver, tensor) for tensor in sent], [(sender, tensor) for tensor in data])
            for item, tensor in zip(bucket, data, strict=True):
                self.received += tensor.nbytes
                target(item).copy_(tensor)
            heartbeat()

    def _box_of(self, box: _Box) -> torch.Tensor:
        name, chunk, offsets, lengths = box
        return narrow(self._chunk(MetadataIndex(name, chunk)), offsets, lengths).contiguous()

    def _dtype(self, item: ReadItem) -> torch.dtype:
        return parse_dtype(self._entries[item.storage_index][1].dtype or "")

    def _itemsize(self, item: ReadItem) -> int:
        return self._dtype(item).itemsize


def _box(item: ReadItem) -> _Box:
    return item.storage_index.fqn, item.storage_index.offset or torch.Size(), item.storage_offsets, item.lengths


def _buckets(items: Iterable[ReadItem], itemsize: Callable[[ReadItem], int]) -> Iterator[list[ReadItem]]:
    """The items, cut into rows where they are large, in lists of at most `PIECE` bytes or one row."""
    bucket: list[ReadItem] = []
    total = 0
    for item in items:
        for piece in _pieces(item, itemsize(item)):
            length = piece.lengths.numel() * itemsize(item)
            if bucket and total + length > PIECE:
                yield bucket
                bucket, total = [], 0
            bucket.append(piece)
            total += length
    if bucket:
        yield bucket


def _pieces(item: ReadItem, itemsize: int) -> Iterator[ReadItem]:
    """The item, cut along its first dimension into items of at most `PIECE` bytes or one row."""
    if item.lengths.numel() * itemsize <= PIECE:
        yield item
        return
    (count, *rest), (stored, *beside), (begin, *target) = item.lengths, item.storage_offsets, item.dest_offsets
    rows = max(1, PIECE // (torch.Size(rest).numel() * itemsize))
    for row in range(0, count, rows):
        yield replace(
            item,
            storage_offsets=torch.Size([stored + row, *beside]),
            dest_offsets=torch.Size([begin + row, *target]),
            lengths=torch.Size([min(rows, count - row), *rest]),
        )


def _transfer(sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Send contiguous tensors to ranks and receive tensors of ranks as bytes, all at the same time."""
    operations = [dist.P2POp(dist.irecv, tensor.view(-1).view(torch.uint8), rank) for rank, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor.view(-1).view(torch.uint8), rank) for rank, tensor in sends]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
