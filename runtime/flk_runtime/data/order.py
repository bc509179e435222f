"""The orders of the samples of an epoch, which depend on the seed and the epoch only.

The orders that a sampler of the script gives are in `samplers`.

A shuffled order takes no memory: it is a keyed permutation of the positions, a Feistel network. A position is two
halves, and each round changes one half by a hash of the other. The network permutes the numbers below a power of 4; a
result that is no position goes through it again until it is one (cycle walking: Black and Rogaway, CT-RSA 2002).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from flk_runtime.system import rng

OWN = "own"
"""The order that the dataset has."""
SHUFFLED = "feistel"
"""The order of a loader that shuffles."""
SAMPLED = "sampler"
"""The order that a sampler of the script gives."""
STREAM = "stream"
"""The order in which an iterable gives its elements."""

_BLOCK = 32  # ranges whose indices are computed by one call
_ROUNDS = 6
# The multipliers of splitmix64 (Steele et al., OOPSLA 2014), as signed numbers: torch does not compute with unsigned.
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


class EpochOrder:
    """The order of an epoch's ``samples`` over all ranks: at each of ``length`` positions a sample.

    ``kind`` is OWN or SHUFFLED.
    """

    def __init__(self, kind: str, samples: int, seed: int, epoch: int) -> None:
        self._kind, self._samples, self.length = kind, samples, samples
        self._bits = max(1, ((samples - 1).bit_length() + 1) // 2)  # of a half
        self._keys = [rng.derive_seed("order", seed, epoch, number) for number in range(_ROUNDS)]

    def count(self, positions: range) -> int:
        """The number of samples at ``positions``."""
        return len(positions)

    def indices(self, ranges: Iterator[range]) -> Iterator[list[Any]]:
        """Yield the indices of the samples at each range of positions."""
        while block := list(islice(ranges, _BLOCK)):
            found = self.at(torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in block]))
            for indices in torch.split(found, [len(positions) for positions in block]):
                yield indices.tolist()

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The indices of the samples at ``positions``, int64 of any shape."""
        if self._kind == OWN:
            return positions
        found = self._permuted(positions)
        while bool((outside := found >= self._samples).any()):
            found[outside] = self._permuted(found[outside])
        return found

    def _permuted(self, numbers: torch.Tensor) -> torch.Tensor:
        mask = (1 << self._bits) - 1
        left, right = numbers >> self._bits, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key) & mask)
        return (left << self._bits) | right


def _hash(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` shifted right as unsigned numbers."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
