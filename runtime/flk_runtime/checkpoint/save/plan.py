"""The plan of a save: which rank writes which chunk, and where the chunk is in the rank's shard file.

As with the DefaultSavePlanner of torch.distributed.checkpoint, one of the ranks that hold a chunk writes it, and these
writes are spread evenly. Unlike there, a large chunk is cut into rows that several ranks write. The plan is made once
for a structure and serves all saves until names, shapes, dtypes or the sharding change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.values import Path, name_of
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.shared.shard_file import DATA_BEGIN, Entry, align


class Described(NamedTuple):
    """A chunk without its values, as ranks describe it to each other."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    length: int  # in bytes


class Write(NamedTuple):
    """Rows ``begin`` to ``end`` of chunk number ``chunk`` in the rank's own list; a scalar has one row."""

    chunk: int
    begin: int
    end: int


@dataclass(frozen=True)
class Plan:
    """The chunks and rows that this rank writes in every save of one structure."""

    writes: list[Write]
    entries: list[Entry]  # of the writes, in their order


def describe(chunks: Sequence[Chunk]) -> list[Described]:
    """The structure of a rank's chunks."""
    return [
        Described(
            chunk.path,
            str(chunk.tensor.dtype).removeprefix("torch."),
            chunk.shape,
            chunk.offsets,
            tuple(chunk.tensor.shape),
            chunk.tensor.numel() * chunk.tensor.element_size(),
        )
        for chunk in chunks
    ]


def make_plan(structure: list[Described]) -> Plan:
    """Agree on which rank writes which chunks. ``structure`` is this rank's. Collective.

    Raises CheckpointError on all ranks if the chunks of all ranks together are not the whole of each tensor.
    """
    writes = process_group.decide(structure, assign)[process_group.rank()]
    entries = []
    position = DATA_BEGIN
    for write in writes:
        described = structure[write.chunk]
        offsets, size = rows(described, write)
        length = described.length // max(1, _rows(described)) * (write.end - write.begin)
        entries.append(
            Entry(
                name_of(described.path),
                described.path,
                position,
                length,
                described.dtype,
                described.shape,
                offsets,
                size,
            )
        )
        position = align(position + length)
    return Plan(writes, entries)


def assign(structures: Sequence[Sequence[Described]]) -> list[list[Write]]:
    """The writes of each rank, from the chunks that each rank holds. Raises CheckpointError as `make_plan` does."""
    holders: dict[Described, list[tuple[int, int]]] = {}  # of each chunk: ranks, and its index there
    for rank, structure in enumerate(structures):
        for index, described in enumerate(structure):
            holders.setdefault(described, []).append((rank, index))
    _check_whole(list(holders))
    load = [0] * len(structures)
    writes: list[list[Write]] = [[] for _ in structures]
    shared = []
    for described, held in holders.items():
        if len(held) == 1:
            rank, index = held[0]
            writes[rank].append(Write(index, 0, _rows(described)))
            load[rank] += described.length
        else:
            shared.append((described, held))
    share = (sum(load) + sum(described.length for described, _ in shared)) / len(structures)
    for described, held in sorted(shared, key=lambda pair: -pair[0].length):
        count = _rows(described)
        cuts = max(1, min(count, len(held), round(4 * described.length / share))) if share else 1
        for number in range(cuts):
            begin, end = count * number // cuts, count * (number + 1) // cuts
            rank, index = min(held, key=lambda pair: load[pair[0]])
            writes[rank].append(Write(index, begin, end))
            load[rank] += described.length * (end - begin) // max(1, count)
    return [sorted(own) for own in writes]


def rows(described: Described, write: Write) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets in the full tensor and the size of the rows that ``write`` writes."""
    if not described.size:
        return described.offsets, described.size
    begin, *offsets = described.offsets
    return (begin + write.begin, *offsets), (write.end - write.begin, *described.size[1:])


def cut(tensor: torch.Tensor, write: Write) -> torch.Tensor:
    """The rows of a chunk that ``write`` writes, as a view; the chunk itself if these are all."""
    return tensor[write.begin : write.end] if tensor.dim() and write.end - write.begin < len(tensor) else tensor


def _rows(described: Described) -> int:
    return described.size[0] if described.size else 1


def _check_whole(chunks: Sequence[Described]) -> None:
    """Raise CheckpointError unless the chunks of each name are all of one tensor, without overlaps."""
    found: dict[str, tuple[Any, int]] = {}
    for described in chunks:
        kind, numel = found.get(name_of(described.path), ((described.shape, described.dtype), 0))
        if kind != (described.shape, described.dtype):
            raise MismatchError(
                f"ranks hold different tensors under the name {name_of(described.path)!r}: of shape {kind[0]} and "
                f"dtype {kind[1]}, and of shape {described.shape} and dtype {described.dtype}"
            )
        found[name_of(described.path)] = kind, numel + torch.Size(described.size).numel()
    for name, ((shape, _), numel) in found.items():
        if numel != torch.Size(shape).numel():
            raise MismatchError(
                f"the ranks hold {numel} of the {torch.Size(shape).numel()} elements of {name!r}: call save on all "
                "ranks, after optimizer.step()"
            )
