"""PodReader: reads a checkpoint in the memory of the pods, whose shards are spread over the ranks.

Each rank opens the shards that it is the reader of: its own one if as many ranks have saved. It reads what it needs of
other shards in its pod from their files, also of shards that another pod reads and of which this one holds a copy. What
its pod lacks comes over the process group, once for all ranks of the pod. Where each rank reads what it has written
itself, as under FSDP, no values travel, and of the headers the one of rank 0, which names the unsharded tensors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from flk_runtime.checkpoint import pod_exchange
from flk_runtime.checkpoint.pod_exchange import PodExchange
from flk_runtime.checkpoint.shard import ChunkReader, add_entries, entry_index, map_file, narrow, place, view_tensor
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.distributed import process_group
from flk_runtime.errors import StorageError
from flk_runtime.shared.shard_file import Entry, ShardHeader, read_header, value_name

_SAMPLE: Final = 16  # entries
_ALIGNMENT: Final = 16  # bytes of the largest dtype
_CPU: Final = torch.device("cpu")

_Box = list[Any]  # of a shard's chunk: name and offsets of the chunk, offsets in the chunk, and size; as JSON


class _Unread(NamedTuple):
    """The header of a shard as it travels."""

    text: bytes  # compressed JSON
    sample: bytes  # some of its chunks, each with its name, offsets and size; as JSON

    @classmethod
    def of(cls, header: ShardHeader) -> _Unread:
        tensors = [(entry.name, entry.offsets, entry.size) for entry in header.entries if entry.dtype]
        sample = json.dumps(tensors[:: max(1, len(tensors) // _SAMPLE)])
        return cls(zlib.compress(header.to_json(), 1), sample.encode())

    def header(self) -> ShardHeader:
        return ShardHeader.from_json(zlib.decompress(self.text))

    def has_piece_of(self, wanted: Mapping[str, Chunk]) -> bool:
        """Whether the sample has a piece of one of these chunks, which are given by name."""
        return any(
            name in wanted and _overlap(wanted[name], offsets, size) for name, offsets, size in json.loads(self.sample)
        )


class PodReader(ChunkReader):
    """Reads a checkpoint whose shards the ranks hold. The constructor, `cover` and `read_data` are collective."""

    def __init__(
        self,
        readers: Sequence[int],
        open_shard: Callable[[int], Path],
        processes: int = 1,
        folder: Path | None = None,
        copies: Collection[int] = (),
    ) -> None:
        """``readers`` are the ranks that open each shard, by the rank that wrote it.

        ``open_shard(rank)`` returns the path of the shard that this rank wrote, a whole and undamaged file; ranks of
        one pod can open the same ones. ``processes`` and ``folder`` are as in `PodExchange`. ``copies`` are shards that
        other pods read and that this pod may hold too: for one that it does not, ``open_shard`` raises StorageError.
        """
        self._rank, self._readers, self._open_shard = process_group.rank(), readers, open_shard
        self._copies = copies
        self.exchange = PodExchange(processes, folder)
        """How bytes of other pods come to this one."""
        self.received = 0
        """Bytes of tensors that this rank has received of other pods for its pod."""
        self._mapped: dict[int, mmap.mmap] = {}  # shards in this pod, by the rank that wrote them
        self._headers: dict[int, ShardHeader] = {}
        self._values: dict[str, bytes] = {}  # plain values that this rank may need, by name
        for shard, reader in enumerate(readers):
            if reader == self._rank:
                memory = self._memory(shard)
                self._headers[shard] = header = read_header(memory)
                (entry,) = (entry for entry in header.entries if entry.dtype is None)
                self._values[entry.name] = memory[entry.begin : entry.begin + entry.length]
        self._own = list(self._headers)  # the shards that this rank reads
        self._entries: dict[MetadataIndex, tuple[int, Entry]] = {}
        self._metadata: Any = Metadata({}, planner_data={})
        self._others: dict[int, _Unread] = {}  # headers of further shards
        self._gathered = False  # this rank has, or had, all of them there
        self._share_names()
        if len(readers) != process_group.world_size():
            for values in self.exchange.all_gather(self._values):
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
            wanted = {chunk.name: chunk for chunk in lacking}
            found = [shard for shard, other in self._others.items() if not certain or other.has_piece_of(wanted)]
            for shard in found:
                self._headers[shard] = self._others.pop(shard).header()
            self._add(self._headers)
            lacking = [chunk for chunk in lacking if not self._covers(chunk)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan, and give other pods what they need for theirs."""
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        here = self._open_copies({self._shard_of(item) for item in tensors})
        remote = [item for item in tensors if not (self._is_near(item) or self._shard_of(item) in here)]
        remote_anywhere, without_device = process_group.maximum(
            len(remote),
            int(not torch.cuda.is_initialized()),  # type: ignore[no-untyped-call]
        )
        if remote_anywhere:
            # On the device, the values travel between the devices.
            self.exchange.device = process_group.comm_device(_CPU if without_device else torch.device("cuda"))
            self._exchange(remote, planner)
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
            name, given = value_name(0), dict[str, bytes]()
            if self._rank == 0:
                given = {"header": self._headers[0].to_json(), "values": self._values[name]}
            first = self.exchange.all_gather(given)[0]
            self._headers[0], self._values[name] = ShardHeader.from_json(first["header"]), first["values"]
            known = {entry.name for entry in self._headers[0].entries}
        own = [entry for header in self._headers.values() for entry in header.entries]
        add_entries(self._metadata, own, chunks=False)
        further = {entry.name: json.dumps(vars(entry)).encode() for entry in own if entry.name not in known}
        for more in self.exchange.all_gather(further):
            entries = [Entry.from_dict(json.loads(each)) for each in more.values()]
            add_entries(self._metadata, entries, chunks=False)

    def _gather_headers(self) -> None:
        """Have every rank hold the headers of all shards, unread: the headers of a sharded model have many entries."""
        own = {str(shard): pod_exchange.packed(_Unread.of(self._headers[shard])._asdict()) for shard in self._own}
        for headers in self.exchange.all_gather(own):
            found = {int(shard): _Unread(**pod_exchange.unpacked(each)) for shard, each in headers.items()}
            self._others |= {shard: header for shard, header in found.items() if shard not in self._headers}
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

    def _is_near(self, item: ReadItem) -> bool:
        """Whether this pod holds the item's shard."""
        return self.exchange.is_near(self._readers[self._shard_of(item)])

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

    def _exchange(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read items of shards in other pods, and give other pods what they read of this rank's shards."""
        targets: dict[str, list[ReadItem]] = {}  # what this rank reads, by box
        boxes: dict[int, list[_Box]] = {}  # by the rank that has them
        for item in items:
            for piece in _pieces(item, self._dtype(item.storage_index.fqn).itemsize, pod_exchange.PIECE):
                targets.setdefault(str(_box(piece)), []).append(piece)
                boxes.setdefault(self._readers[self._shard_of(item)], []).append(_box(piece))
        wanted: dict[int, dict[str, _Box]] = {}  # by the rank that has them, each once
        for of_rank in self.exchange.share_in_pod(list(boxes.items())):
            for reader, found in of_rank:
                wanted.setdefault(reader, {}).update((str(box), box) for box in found)
        asked = self.exchange.swap(
            {
                rank: list(wanted.get(rank, {}).values())
                for rank in range(process_group.world_size())
                if self.exchange.receives(rank)
            }
        )
        arriving = {rank: self._buckets(found.values()) for rank, found in wanted.items()}
        leaving = {self.exchange.pod_of(rank): self._buckets(found) for rank, found in asked.items()}

        def fill(pod: int, number: int, memory: torch.Tensor) -> None:
            for box, raw in self._cut(leaving[pod][number], memory):
                name, chunk, offsets, size = box
                values = narrow(self._chunk(MetadataIndex(name, torch.Size(chunk))), offsets, size).contiguous()
                raw.copy_(values.view(-1).view(torch.uint8))

        def take(rank: int, number: int, memory: torch.Tensor) -> None:
            for box, raw in self._cut(arriving[rank][number], memory):
                self.received += len(raw) * self.exchange.receives(rank)
                for item in targets.get(str(box), ()):
                    place(raw.view(self._dtype(box[0])).view(item.lengths), item, planner)

        self.exchange.exchange(self._sizes(arriving), self._sizes(leaving), fill, take)

    def _buckets(self, boxes: Iterable[_Box]) -> list[list[_Box]]:
        """The boxes of each piece that travels."""
        found = list(boxes)
        cuts = _buckets([_aligned(self._box_size(box)) for box in found], pod_exchange.PIECE)
        return [found[begin:end] for begin, end in cuts]

    def _sizes(self, buckets: dict[int, list[list[_Box]]]) -> dict[int, list[int]]:
        return {
            key: [sum(_aligned(self._box_size(box)) for box in bucket) for bucket in found]
            for key, found in buckets.items()
        }

    def _cut(self, boxes: Iterable[_Box], memory: torch.Tensor) -> Iterator[tuple[_Box, torch.Tensor]]:
        """Each box with its bytes in the memory of a bucket."""
        begin = 0
        for box in boxes:
            size = self._box_size(box)
            yield box, memory[begin : begin + size]
            begin += _aligned(size)

    def _box_size(self, box: _Box) -> int:
        return torch.Size(box[3]).numel() * self._dtype(box[0]).itemsize

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._metadata.state_dict_metadata[name].properties.dtype
        return dtype


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


def _pieces(item: ReadItem, itemsize: int, limit: int) -> Iterator[ReadItem]:
    """The item, cut along its first dimensions into items of at most ``limit`` bytes."""
    bytes_of_row = item.lengths.numel() * itemsize
    if bytes_of_row <= limit:
        yield item
        return
    dimension = next(index for index, length in enumerate(item.lengths) if length > 1)
    count = item.lengths[dimension]
    rows = max(1, limit * count // bytes_of_row)
    for begin in range(0, count, rows):
        lengths = [*item.lengths]
        lengths[dimension] = min(rows, count - begin)
        offsets = [
            torch.Size(each + begin * (index == dimension) for index, each in enumerate(found))
            for found in (item.storage_offsets, item.dest_offsets)
        ]
        piece = replace(item, storage_offsets=offsets[0], dest_offsets=offsets[1], lengths=torch.Size(lengths))
        yield from _pieces(piece, itemsize, limit)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
