"""Cheap comparisons of tensors: the sum of their bits, and in which of many steps or passes to compare."""

from __future__ import annotations

from typing import Final

import torch

_FIRST: Final = 8
_EVERY: Final = 512
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
_PART: Final = 1 << 16  # bytes; a large copy, once freed, makes malloc keep what saves free


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of ``values`` as integers, of shape (); the same in any layout in memory."""
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.resolve_neg()
    flat = real.contiguous().flatten()
    if flat.device.type != "cpu":
        return flat.view(_WORDS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64)
    # As int64, since a CPU copies what it sums in another type.
    if not flat.nbytes % 8 and not flat.storage_offset() * flat.element_size() % 8:
        return flat.view(torch.int64).sum()
    data = flat.view(torch.uint8)
    whole = len(data) // 8 * 8
    words, rest = data[:whole], data[whole:]
    total = rest.sum(dtype=torch.int64)
    if not words.storage_offset() % 8:
        return total + words.view(torch.int64).sum()
    for begin in range(0, whole, _PART):
        total += words[begin : begin + _PART].clone().view(torch.int64).sum()
    return total


def compared_part(values: torch.Tensor, count: int) -> torch.Tensor:
    """The rows of ``values`` to compare the ``count``-th time, as a view, where `is_compared` says so.

    All rows the first time, and where the times are rare; between them a seventh of a large tensor's rows, other ones
    each time, since a rank takes longer to read all that ranks hold alike than to copy its share of it.
    """
    parts, part = _FIRST - 1, count - 2
    if not 0 <= part < parts or values.nbytes <= _PART or len(values) < parts:
        return values
    return values[len(values) * part // parts : len(values) * (part + 1) // parts]


def is_compared(count: int) -> bool:
    """Whether the ``count``-th time, from 1 on, is one to compare: the first 8 times, powers of 2, every 512th."""
    return count <= _FIRST or count % _EVERY == 0 or not count & (count - 1)
