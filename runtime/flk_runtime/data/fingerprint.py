"""Fingerprints of data, by which ranks notice that their data differ, before samples are lost or repeated.

A fingerprint runs no code of the dataset but its length: reading a sample would draw random numbers, open files before
workers fork, or take elements away. It has a few entries of the sequences in memory that a dataset with an index
consists of, and the first elements of a stream as they are read. Other containers are not compared.

Ranks may see the same data a little differently: they decode and round otherwise, and have files in other folders. So
whole numbers and texts are compared, other numbers by two digits of a mean, and paths by their last part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from types import NoneType
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from flk_runtime.system import pytree

_DEPTH: Final = 5  # datasets within datasets
_LINES: Final = 100
_ENTRIES: Final = 8  # of a sequence
_KEYS: Final = 100  # of a mapping; one with more is a cache
_LEAVES: Final = 32  # of an entry
_WHOLE: Final = (torch.int64, torch.int32, torch.int16)  # one of 8 bits may be a decoded picture
_TEXT, _NUMBERS = 64, 4096

Line = tuple[str, str]  # a path, and what is there


def length_of(dataset: Any) -> int | None:
    """The length of a dataset; None if it has none that is known, as a chain of iterables."""
    try:
        return len(dataset)
    except Exception:  # of any kind: it is the code of a script
        return None


def describe_data(data: Any, least: int) -> list[Line]:
    """Lines about the parts of ``data`` in memory that must be the same on all ranks: types, lengths, some entries.

    Of the sequences that it holds, those count that have at least ``least`` entries, and as many as ``data`` itself.
    """
    return list(islice(_describe(data, least, "dataset", _DEPTH), _LINES))


def _describe(data: Any, least: int, path: str, depth: int) -> Iterator[Line]:
    length = None if isinstance(data, Mapping) else length_of(data)  # a mapping may be a cache that grows
    yield path, f"{type(data).__name__} of length {length}"
    if _is_sequence(data):
        yield from _entries(data, path)
        return
    held = data if isinstance(data, Mapping) else getattr(data, "__dict__", {})
    shortest = max(least, length or 1)
    for name, value in list(held.items()) if depth and len(held) <= _KEYS else ():
        first = value[:_ENTRIES] if isinstance(value, (list, tuple)) else ()
        several = first if all(_is_data(part, shortest) for part in first) else ()  # as of ConcatDataset
        for part in several or [value]:
            if isinstance(name, str) and (_is_data(part, shortest) or isinstance(part, Mapping)):  # no cache by index
                yield from _describe(part, 1 if isinstance(part, Dataset) else shortest, f"{path}.{name}", depth - 1)


def _is_data(value: Any, least: int) -> bool:
    """Whether this is a dataset, or a sequence of at least ``least`` entries."""
    return isinstance(value, Dataset) or (_is_sequence(value) and (length_of(value) or 0) >= least)


def _is_sequence(value: Any) -> bool:
    """Whether this is a sequence in memory, or rows of Hugging Face's, which are read without their transforms."""
    library = type(value).__module__.partition(".")[0]
    return isinstance(value, (list, tuple, range, torch.Tensor)) or library in ("numpy", "datasets")


def _entries(data: Any, path: str) -> list[Line]:
    with contextlib.suppress(Exception):  # of any kind: it may be an object of the script
        rows, last = data.with_format("arrow") if hasattr(data, "with_format") else data, len(data) - 1
        places = sorted({last * number // (_ENTRIES - 1) for number in range(_ENTRIES)})
        if not any(rows[place] is None for place in places):  # a cache, which ranks may have filled otherwise
            return [(f"{path}[{place}]", text_of(rows[place])) for place in places]
    return []


def text_of(entry: Any) -> str:
    """The values that are alike on all ranks with the same entry: its whole numbers and texts.

    An entry that has neither is described by means of its other numbers.
    """
    exact: list[str] = []
    means: list[str] = []
    with contextlib.suppress(Exception):  # of any kind: an entry is an object of the script
        for leaf in pytree.leaves(entry.to_pydict() if hasattr(entry, "to_pydict") else entry)[:_LEAVES]:
            if isinstance(leaf, (NoneType, int, str, bytes, PurePath)):
                exact.append(str(leaf).rpartition("/")[2][-_TEXT:])
            elif isinstance(leaf, float) or hasattr(leaf, "dtype"):
                numbers = torch.as_tensor(leaf).flatten()[:_NUMBERS]
                if numbers.dtype in _WHOLE:
                    exact.append(f"{tuple(leaf.shape)} {numbers[:_LEAVES].tolist()}")
                elif numbers.numel():  # absolute ones, since small sums of large numbers are not alike
                    means.append(f"{numbers.double().abs().mean().item():.1e}")
    return ", ".join(exact or means)
