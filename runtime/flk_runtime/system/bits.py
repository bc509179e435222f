"""Cheap comparisons of tensors: the sum of their bits, and in which of many steps or passes to compare."""

from __future__ import annotations

from typing import Final

import torch

_FIRST: Final = 8
_EVERY: Final = 512
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_PART: Final = 1 << 12  # elements; a large copy, once freed, makes malloc keep what saves free


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of ``values`` as integers, of shape (); the same in any order."""
    real = torch.view_as_real(values) if values.is_complex() else values
    words = real.contiguous().view(_WORDS.get(real.element_size(), torch.uint8)).flatten()
    if words.device.type != "cpu":
        return words.sum(dtype=torch.int64)
    # In parts, because a CPU copies what it sums in another type.
    total = torch.zeros((), dtype=torch.int64)
    for begin in range(0, len(words), _PART):
        total += words[begin : begin + _PART].sum(dtype=torch.int64)
    return total


def is_compared(count: int) -> bool:
    """Whether the ``count``-th time, from 1 on, is one to compare: the first 8 times, powers of 2, every 512th."""
    return count <= _FIRST or count % _EVERY == 0 or not count & (count - 1)
