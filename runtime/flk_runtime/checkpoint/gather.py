"""PodReader: reads a checkpoint in the memory of the pods, whose shards are spread over the ranks.

Each rank opens the shards that it is the reader of: its own one if as many ranks have saved. It reads what it needs of
other shards in its pod from their files, also of shards that another pod reads and of which this one holds a copy. What
its pod lacks comes from the ranks that read it, in pieces. Where each rank reads what it has written itself, as under
FSDP, no values travel but the plain ones of rank 0, and of the headers the one of rank 0, which names the unsharded
tensors: with a thousand ranks the headers of all are some hundred megabytes.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from flk_runtime.checkpoint.shard import (
    ChunkReader,
    Target,
    add_entries,
    entry_index,
    map_file,
    narrow,
    parse_dtype,
    view_tensor,
)
from flk_runtime.distributed import process_group
from flk_runtime.errors import StorageError
from flk_runtime.shared.progress import heartbeat
from flk_runtime.shared.shard_file import Entry, read_header, value_name

PIECE = 4 << 20  # bytes that a rank receives of another one in a turn, and sends to another one

_Box = tuple[str, torch.Size, torch.Size, torch.Size]  # name and offsets of a chunk, offsets in the chunk, and size


class PodReader(ChunkReader):
    """Reads a checkpoint whose shards the ranks hold. The constructor, `complete` and `read` are collective."""

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
        self._metadata = Metadata({}, planner_data={})
        self._own = {
            shard: read_header(self._memory(shard)).entries
            for shard, reader in enumerate(readers)
            if reader == self._rank
        }
        of_main = process_group.on_main(lambda: self._own)
        known = {entry.name for entries in of_main.values() for entry in entries}
        further = {
            shard: tuple(entry for entry in entries if entry.name not in known) for shard, entries in self._own.items()
        }
        for held in [of_main, *process_group.all_gather(further), self._own]:  # names in the same order on all ranks
            self._add(held)
        # Plain values that this rank may need.
        self._values = {value_name(shard): self._value(shard) for shard in self._own}
        if len(readers) == process_group.world_size():  # each rank reads its own
            self._values |= process_group.on_main(lambda: {value_name(0): self._value(0)})
        else:
            for values in process_group.all_gather(self._values):
                self._values |= values

    def read_metadata(self) -> Metadata:
        """The names of all tensors, and the chunks that this rank and rank 0 hold; after `complete` all chunks."""
        return self._metadata

    def complete(self, *, lacks: bool) -> bool:
        if not process_group.maximum(int(lacks))[0]:
            return False
        for held in process_group.all_gather(self._own):
            self._add(held)
        return True

    def _add(self, held: Mapping[int, Sequence[Entry]]) -> None:
        """Have the metadata name the entries of shards."""
        for shard, entries in held.items():
            found = {index: entry for entry in entries if (index := entry_index(entry)) not in self._entries}
            self._entries |= {index: (shard, entry) for index, entry in found.items()}
            add_entries(self._metadata, found.values())

    def read(self, items: Sequence[ReadItem], target: Target) -> None:
        """Read the items of this rank, and give other pods what they need for theirs."""
        here = self._shards_here({self._shard_of(item) for item in items})
        remote = [item for item in items if self._shard_of(item) not in here]
        remote_anywhere, without_device = process_group.maximum(
            len(remote),
            int(not torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        )
        if remote_anywhere:
            # On the device, the values travel between the devices. gloo takes no memory of one for that.
            with_nccl = not without_device and "nccl" in str(dist.get_backend_config())
            device = process_group.comm_device(torch.device("cuda" if with_nccl else "cpu"))
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

    def _shards_here(self, shards: set[int]) -> set[int]:
        """The shards among these that this pod holds now. A later save may take the memory of a copy."""
        here = {shard for shard in shards if self._readers[shard] in self._near}
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
        wanted = {
            rank: list(_buckets(found, lambda item: self._dtype(item).itemsize)) for rank, found in lacking.items()
        }
        boxes = {rank: [list(map(_box, bucket)) for bucket in buckets] for rank, buckets in wanted.items()}
        asked = _swap(boxes, device)
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


def _swap(values: Mapping[int, Any], device: torch.device) -> dict[int, Any]:
    """Give each of these ranks a value, and return what ranks give this one. Collective; values travel by pickle."""
    given = {
        rank: torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for rank, value in values.items()
    }
    sizes = process_group.all_gather({rank: len(data) for rank, data in given.items()})
    own = process_group.rank()
    arriving = {
        rank: torch.empty(of[own], dtype=torch.uint8, device=device) for rank, of in enumerate(sizes) if own in of
    }
    _transfer([(rank, data.to(device)) for rank, data in given.items()], arriving.items())
    return {rank: pickle.loads(data.cpu().numpy().tobytes()) for rank, data in arriving.items()}  # noqa: S301


def _transfer(sends: Iterable[tuple[int, torch.Tensor]], receives: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Send contiguous tensors to ranks and receive tensors of ranks as bytes, all at the same time."""
    operations = [dist.P2POp(dist.irecv, tensor.view(-1).view(torch.uint8), rank) for rank, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor.view(-1).view(torch.uint8), rank) for rank, tensor in sends]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
