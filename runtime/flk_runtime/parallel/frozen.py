"""Frozen parameters that checkpoints leave out, such as the base of LoRA: a checkpoint has the hashes of their values.

The script loads them at each start, before `parallelize`. A checkpoint of other values is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from flk_runtime.checkpoint import Chunk, DistributedStateful, SplitState, chunks_of
from flk_runtime.distributed import process_group
from flk_runtime.errors import MismatchError
from flk_runtime.parallel.model import ParallelModel

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

_ELEMENTS = 1 << 22  # that are hashed at once
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, and near the golden ratio of 2**64, which spreads neighbouring indices
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenParameters(DistributedStateful):
    """The parameters of a model that require no gradient, by their hashes. Saving and loading it is collective."""

    def __init__(self, parallel: ParallelModel) -> None:
        self._parallel = parallel
        self.names = frozenset(name for name, each in parallel.parameters().items() if not each.requires_grad)
        self._hashes: dict[str, int] = {}  # since the first save or load
        self._versions: dict[str, int] = {}  # of the parameters then: torch counts the changes in place

    def save_state(self, name: str) -> SplitState:
        if not self._hashes:
            self._hash()
        for own, each in self._frozen().items():
            if each.requires_grad or each._version != self._versions[own]:
                what = "requires a gradient" if each.requires_grad else "has been changed"
                raise MismatchError(
                    f"cannot save: {own!r} {what}, and checkpoints leave it out because it was frozen when the model "
                    "was parallelized: leave save_frozen=False out"
                )
        return SplitState([], {"hashes": dict(self._hashes)})

    def load_state(self, saved: SavedObject) -> None:
        self._hash()
        for name, found in saved.plain["hashes"].items():
            if self._hashes.get(name) != found:
                raise ValueError(
                    f"{name!r} has other values here, and the checkpoint does not have it because it was frozen: load "
                    "the weights with which the training began, before parallelize"
                )

    def _frozen(self) -> dict[str, torch.Tensor]:
        parameters = self._parallel.parameters()
        return {name: parameters[name] for name in sorted(self.names)}

    def _hash(self) -> None:
        """Hash all values. Collective."""
        frozen = self._frozen()
        own = [
            (name, chunk.offsets, hash_of(chunk)) for name, each in frozen.items() for chunk in chunks_of((name,), each)
        ]
        boxes: dict[tuple[str, Sequence[int]], int] = {}  # a box that several ranks hold counts once
        for rank in reversed(process_group.all_gather(own)):
            boxes |= {(name, tuple(offsets)): value for name, offsets, value in rank}
        self._hashes = dict.fromkeys(frozen, 0)
        for (name, _), value in boxes.items():
            self._hashes[name] = (self._hashes[name] + value) % (1 << 64)
        self._versions = {name: each._version for name, each in frozen.items()}


def hash_of(chunk: Chunk) -> int:
    """A sum over the elements of numbers that their bits and their places in the full tensor give, well mixed.

    The sums of the boxes of a tensor add up to the same number however it is cut.
    """
    total = 0
    for values, index in _pieces(chunk):
        mixed = values ^ ((index + 1) * _FACTOR)
        mixed = (mixed ^ (mixed >> 29)) * _FACTOR  # an odd factor and a shift lose no bit
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % (1 << 64)


def _pieces(chunk: Chunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements of a chunk as int64 of shape (n,), and their indices in the flat full tensor, piece by piece."""
    tensor, shape, offsets = chunk.tensor, (*chunk.shape, 1), (*chunk.offsets, 0)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor.unsqueeze(-1)
    shape = (*shape[:-1], tensor.shape[-1])
    index = torch.zeros((), dtype=torch.int64, device=tensor.device)
    stride = 1
    for dimension in reversed(range(1, tensor.dim())):
        along = torch.arange(tensor.shape[dimension], device=tensor.device) + offsets[dimension]
        index = index + (along * stride).view(-1, *[1] * (tensor.dim() - 1 - dimension))
        stride *= shape[dimension]
    rows = max(1, _ELEMENTS // max(1, tensor[:1].numel()))
    for begin in range(0, len(tensor), rows):
        piece = tensor[begin : begin + rows].contiguous()
        along = (torch.arange(len(piece), device=tensor.device) + begin + offsets[0]) * stride
        places = along.view(-1, *[1] * (tensor.dim() - 1)) + index
        values = piece.view(_INTEGERS[piece.element_size()]).to(torch.int64)
        yield values.flatten(), places.expand(piece.shape).flatten()
