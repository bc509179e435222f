"""Fingerprints of data, by which ranks notice that their data differ, before samples are lost or repeated.

A fingerprint runs no code of the dataset but its length: reading a sample would draw random numbers, open files before
workers fork, or take elements away. Of data with an index it has what is in memory: the lengths of the sequences that
the dataset consists of, and a few of their entries. Of a stream it has elements as they are read.

Ranks may see the same data a little differently: they decode and round otherwise, and have files in other folders. So
whole numbers and texts are compared, other numbers by two digits of a mean, and paths by their last part.
"""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

import torch
from torch.utils.data import Dataset, IterableDataset

from flk_runtime.data import parts

_DEPTH: Final = 6  # datasets within datasets
_LINES: Final = 100
_ENTRIES: Final = 8  # of a sequence
_KEYS: Final = 100  # of a mapping; one with more is a cache
_LEAVES: Final = 32  # of an entry
_WHOLE: Final = {"int64", "int32", "int16", "uint64", "uint32", "uint16"}  # one of 8 bits may be a decoded picture
_REAL: Final = {"float64", "float32", "float16", "bfloat16", "uint8", "int8"}
_NUMBERS: Final = {True: 16, False: 4096}  # of an array: whole ones, and others for their mean
_TEXT: Final = 64
_FIRST, _EVERY, _ROUNDED = 256, 64, 4  # elements of a stream: the first ones count, then one of so many

Line = tuple[str, str]  # a path, and what is there


def describe_data(dataset: Any, shards: int) -> list[Line]:
    """What of ``dataset`` is in memory and must be the same on all ranks: types, lengths and some entries.

    Of a stream, only the sources of its ``shards`` are described, as ranks read different ones; others are compared as
    they are read.
    """
    lines: list[Line] = []
    if parts.is_hugging_face(dataset):
        for source in parts.sources_of(dataset) if shards > 1 else ():
            _walk(source, "dataset", shards, _DEPTH, lines, set())
    elif shards > 1 or not isinstance(dataset, IterableDataset):
        _walk(dataset, "dataset", shards if shards > 1 else None, _DEPTH, lines, set())
    return lines[:_LINES]


def _walk(value: Any, path: str, least: int | None, depth: int, lines: list[Line], seen: set[int]) -> None:
    """Add lines for ``value``: a sequence, or an object with attributes that are sequences of at least ``least``.

    By default of at least as many entries as it has itself: shorter ones are not its data.
    """
    if depth == 0 or id(value) in seen or len(lines) >= _LINES:
        return
    seen.add(id(value))
    length = _length(value)
    lines.append((path, type(value).__name__ + ("" if length is None else f" of length {length}")))
    if _is_sequence(value):
        _walk_entries(value, path, least, depth, lines, seen)
        return
    least = least or length or 1
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    for name, attribute in list(inner.items()) if len(inner) <= _KEYS else ():
        if isinstance(name, str) and _is_data(attribute, least):
            inner_least = None if isinstance(attribute, Dataset) else least
            _walk(attribute, f"{path}.{name}", inner_least, depth - 1, lines, seen)


def _walk_entries(value: Any, path: str, least: int | None, depth: int, lines: list[Line], seen: set[int]) -> None:
    length = len(value)
    positions = sorted({(length - 1) * number // (_ENTRIES - 1) for number in range(_ENTRIES)}) if length else []
    entries = [_entry(value, at) for at in positions]
    if any(entry is None for entry in entries):  # a cache, which ranks may have filled otherwise
        return
    for at, entry in zip(positions, entries, strict=True):
        if isinstance(entry, Dataset) or (least and _is_column(entry, least)):
            _walk(entry, f"{path}[{at}]", None, depth - 1, lines, seen)
        else:
            lines.append((f"{path}[{at}]", ", ".join(_texts(entry)) or type(entry).__name__))


def _is_data(value: Any, least: int) -> bool:
    """Whether ``value`` is a dataset, a sequence of at least ``least`` entries, or has some of these inside."""
    if isinstance(value, (list, tuple)) and value and (isinstance(value[0], Dataset) or _is_column(value[0], least)):
        return True
    return isinstance(value, (Dataset, Mapping)) or _is_column(value, least)


def _is_column(value: Any, least: int) -> bool:
    return _is_sequence(value) and len(value) >= least


def _is_sequence(value: Any) -> bool:
    """Whether this is a sequence that is in memory, or can be read as if it was."""
    return (
        isinstance(value, (list, tuple, range))
        or (_is_array(value) and value.ndim > 0)
        or _is_of(value, "pandas", "DataFrame", "Series")
        or _is_of(value, "datasets", "Dataset")
    )


def _entry(value: Any, at: int) -> Any:
    if _is_of(value, "datasets", "Dataset"):
        return value.with_format("arrow")[at].to_pydict()  # in place of transforms, which may be random
    if _is_of(value, "pandas", "DataFrame", "Series"):
        row = value.iloc[at]
        return row.tolist() if hasattr(row, "tolist") else row
    return value[at]


def _length(value: Any) -> int | None:
    if isinstance(value, Mapping):
        return None
    try:
        return len(value)
    except Exception:  # of any kind: it is the code of a script
        return None


def _is_of(value: Any, module: str, *kinds: str) -> bool:
    """Whether this is an object of a class of a library, which the script has imported then."""
    library = sys.modules.get(module)
    return library is not None and isinstance(value, tuple(getattr(library, kind) for kind in kinds))


def _is_array(value: Any) -> bool:
    """Whether this is a tensor or an array of NumPy whose numbers can be read."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not value.is_meta and not value.is_nested
    return _is_of(value, "numpy", "ndarray", "generic")


class StreamFingerprint:
    """A number of 24 bits, of the elements of a stream that have been read."""

    def __init__(self) -> None:
        self.value = 0
        self._count = 0

    def over(self, stream: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements of ``stream``."""
        for element in stream:
            if self._count < _FIRST or self._count % _EVERY == 0:
                text = ", ".join(_texts(element, rounded=self._count < _ROUNDED))
                self.value = zlib.crc32(text.encode(errors="replace"), self.value) & 0xFFFFFF
            self._count += 1
            yield element


def _texts(entry: Any, *, rounded: bool = True) -> list[str]:
    """What all ranks with the same entry have alike: its whole numbers and texts.

    Means of its other numbers, if it has nothing else and ``rounded``.
    """
    exact: list[str] = []
    means: list[str] = []
    with contextlib.suppress(Exception):  # of any kind: an entry is an object of the script
        _collect(entry, exact, means, 4)
    return exact or (means if rounded else [])


def _collect(value: Any, exact: list[str], means: list[str], depth: int) -> None:
    if depth == 0 or len(exact) + len(means) >= _LEAVES:
        return
    if value is None or isinstance(value, (bool, int)):
        exact.append(str(value) if value is None or value.bit_length() <= 64 else f"{value:x}"[-_TEXT:])
    elif isinstance(value, (str, PurePath)):
        exact.append(str(value).rpartition("/")[2][-_TEXT:])
    elif isinstance(value, bytes):
        exact.append(f"{len(value)} bytes {zlib.crc32(value):x}")
    elif isinstance(value, float):
        means.append(f"{value:.1e}")
    elif _is_array(value):
        kind = str(value.dtype).removeprefix("torch.")
        if kind in _WHOLE or kind in _REAL:
            numbers = value.reshape(-1)[: _NUMBERS[kind in _WHOLE]].tolist()
            if kind in _WHOLE:
                exact.append(f"{tuple(value.shape)} {numbers}")
            elif numbers:  # absolute ones, since small sums of large numbers are not alike
                means.append(f"{math.fsum(map(abs, numbers)) / len(numbers):.1e}")
    elif isinstance(value, (Mapping, list, tuple)):
        children = [value[key] for key in sorted(value, key=repr)] if isinstance(value, Mapping) else value
        for child in children[:_LEAVES]:
            _collect(child, exact, means, depth - 1)
