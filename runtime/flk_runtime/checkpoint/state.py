"""The state of an object as a checkpoint takes it: chunks of tensors, and the plain state without the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flk_runtime.checkpoint.values import REFERENCE, Path, encode, name_of
from flk_runtime.errors import MismatchError
from flk_runtime.system.pytree import leaves

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # classes of tensors that are not split


class Chunk(NamedTuple):
    """The box of a full tensor that this rank holds: the whole tensor, or a box of a sharded one."""

    path: Path
    tensor: torch.Tensor  # the values of the box, on any device
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]  # where the box begins in the full tensor

    @property
    def name(self) -> str:
        return name_of(self.path)


@dataclass(frozen=True)
class SplitState:
    """The chunks and the plain state of an object that this rank offers to a checkpoint.

    One of the ranks that offer a chunk writes it. ``plain`` is the rest of the state, which may hold more tensors; rank
    0's is saved.
    """

    chunks: list[Chunk]
    plain: Any = None


def chunks_of(path: Path, value: torch.Tensor) -> list[Chunk]:
    """The chunks that this rank holds of a tensor, a DTensor or a ShardedTensor; without copies and communication.

    Raises CheckpointError if the tensor is sparse or quantized.
    """
    if value.layout is not torch.strided:
        raise _no_dense(path, f"has the layout {value.layout}")
    shape = tuple(value.shape)
    if hasattr(value, "to_local"):  # a DTensor: not imported, since most runs have none
        (chunk,) = value.__create_chunk_list__()  # type: ignore[attr-defined]
        own = value.to_local().detach()
        # All ranks have the chunk of a tensor without elements, since a checkpoint has every name.
        return [Chunk(path, own, shape, tuple(chunk.offsets))] if own.numel() or not value.numel() else []
    if hasattr(value, "local_shards"):
        return [
            Chunk(path, shard.tensor.detach(), shape, tuple(shard.metadata.shard_offsets))
            for shard in value.local_shards()
            if shard.tensor.numel()
        ]
    if value.is_nested or value.is_meta or value.is_quantized:
        kind = "nested" if value.is_nested else "on the meta device" if value.is_meta else "quantized"
        raise _no_dense(path, f"is {kind}")
    return [Chunk(path, value.detach(), shape, (0,) * value.dim())]


def _no_dense(path: Path, reason: str) -> MismatchError:
    return MismatchError(
        f"cannot save {name_of(path)!r}: it {reason}, and checkpoints hold dense tensors with values; save the plain "
        "tensors that it consists of"
    )


class ChunkCache:
    """The chunks of an object, which are made once as long as its tensors stay where they are in memory.

    Chunks alias the tensors, so their values are the current ones. Without it, the chunks take as long to make as the
    copy of a small model.
    """

    def __init__(self) -> None:
        self._made_of: Any = None  # paths and places of the tensors
        self._chunks: list[Chunk] = []

    def chunks(
        self, tensors: Mapping[Path, torch.Tensor], make: Callable[[Path, torch.Tensor], list[Chunk]]
    ) -> list[Chunk]:
        """The chunks that ``make`` returns for each tensor; the same list while the tensors keep their memory."""
        places = places_of(tensors.values())
        made_of = None if places is None else (list(tensors), places)
        if made_of is None or made_of != self._made_of:
            self._chunks = [chunk for path, value in tensors.items() for chunk in make(path, value)]
            self._made_of = made_of
        return self._chunks


def places_of(tensors: Iterable[torch.Tensor]) -> list[Any] | None:
    """Addresses and layouts of tensors in memory; None if one is sparse or of a subclass, such as a DTensor.

    As long as an alias of each of them exists, nothing else gets its place: tensors with equal places are the same.
    """
    places = []
    for value in tensors:
        if type(value) not in _PLAIN or value.layout is not torch.strided:
            return None
        places.append((value.data_ptr(), value.shape, value.stride(), value.dtype))
    return places


def split_tensors(state: Any, path: Path) -> SplitState:
    """The tensors of a nested state as chunks, and the encoded state with a reference in the place of each tensor.

    Raises CheckpointError if two tensors have one name, if this rank does not hold all of a tensor, or if a value
    cannot be made again.
    """
    chunks: list[Chunk] = []
    names: set[str] = set()

    def take(value: torch.Tensor, path: Path) -> Any:
        name = name_of(path)
        if name in names:
            raise MismatchError(f"two tensors of a state have the name {name!r}: rename a key")
        names.add(name)
        chunks.extend(_whole(value, path))
        return {REFERENCE: name}

    return SplitState(chunks, encode(state, path, take))


def encode_whole(state: Any, path: Path) -> Any:
    """A nested state encoded, with the tensors in it.

    Raises CheckpointError as `split_tensors` does, and for a tensor of a class that torch.load refuses.
    """

    def take(value: torch.Tensor, path: Path) -> torch.Tensor:
        _whole(value, path)
        kind = type(value)
        if kind not in _PLAIN and kind not in torch.serialization.get_safe_globals():
            raise MismatchError(
                f"cannot save {name_of(path)!r}: it is a {kind.__module__}.{kind.__qualname__}, a class of tensors "
                "that torch.load does not take from a checkpoint: save its as_subclass(torch.Tensor)"
            )
        return value.detach()  # without the attributes that a script may have given it

    return encode(state, path, take)


def _whole(value: torch.Tensor, path: Path) -> list[Chunk]:
    """The chunks of a tensor. Raises CheckpointError if other ranks hold some."""
    found = chunks_of(path, value)
    if sum(chunk.tensor.numel() for chunk in found) != torch.Size(value.shape).numel():
        raise MismatchError(
            f"cannot save {name_of(path)!r}: it is sharded over the ranks, and only parallelized models and their "
            "optimizers are saved so; parallelize it, or use a strategy that does not shard"
        )
    return found


def has_tensors(value: Any) -> bool:
    """Whether a nested state holds a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
