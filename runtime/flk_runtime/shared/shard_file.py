"""Shard files: one rank's shard of a checkpoint as one file, which ranks and launchers read alike.

A checkpoint of a job with N ranks consists of N shards. A shard is written into a file in tmpfs that is made once and
used again. What does not change from save to save is written once::

    0    preamble   128 bytes: which shard it is, where its header and values are, checksums
    128  tensors   raw bytes of each chunk of a tensor, each begins at a multiple of 64
         header    JSON: of each chunk its name, its place in the full tensor and in the file; what wrote the shard
         values    plain values, as the bytes of torch.save

The rank that writes the file clears the preamble before anything else changes, and writes an open one last. Its
launcher then computes the checksum and seals the preamble, so a file with a sealed preamble holds a whole shard. This
module does not import torch; `flk_runtime.checkpoint.shard` reads the tensors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from flk_runtime.errors import MismatchError
from flk_runtime.system import host
from flk_runtime.system.checksum import checksum, crc32

FORMAT: Final = 2
ALIGNMENT: Final = 64  # bytes
DATA_BEGIN: Final = 128  # bytes of the preamble
_SEALED: Final = b"flk-part"
_OPEN: Final = b"flk-open"
# Magic, format, fields of `ShardPreamble`, CRC-32 of what comes before it.
_LAYOUT: Final = struct.Struct("<8sHQQIIQQIQQ32sI")
_CHECKSUM: Final = struct.Struct("<I")


class ShardError(MismatchError):
    """A file does not hold a whole, undamaged shard."""


@dataclass(frozen=True)
class Entry:
    """A chunk of a tensor, or a plain value, in a shard file.

    The chunk is the box of shape ``size`` that begins at ``offsets`` in the full tensor of shape ``shape``. ``path`` is
    where the entry is in the nested state: keys of dictionaries (str) and indices of lists (int).
    """

    name: str  # the path, joined by dots
    path: tuple[str | int, ...]
    begin: int  # in the file, in bytes
    length: int  # in bytes
    dtype: str | None = None  # as "float32"; None: a plain value, in the format of torch.save
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    size: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """The entry from its attributes, after they have travelled as JSON. Raises KeyError or TypeError."""
        return cls(**{**data, **{name: tuple(data[name]) for name in ("path", "shape", "offsets", "size")}})


@dataclass(frozen=True)
class ShardHeader:
    """The header of a shard file: its content, and the rank and the step that it is of."""

    step: int  # optimizer steps that the checkpoint was taken after
    world_size: int  # number of shards of the checkpoint
    rank: int  # that wrote the shard
    entries: tuple[Entry, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what wrote it: job, code, versions, strategy


class ShardPreamble(NamedTuple):
    """The beginning of a shard file. Places and lengths are in bytes."""

    step: int
    number: int  # the number of the save in its attempt
    world_size: int
    rank: int
    header_begin: int
    header_length: int
    header_checksum: int
    values_begin: int
    values_length: int
    attempt: bytes = b""  # ID of the attempt that wrote the shard, in ASCII; empty until the shard is sealed
    checksum: int = 0  # CRC-32 of the bytes between the preamble and `end`

    @property
    def end(self) -> int:
        """The number of bytes of the shard, from the beginning of its file; the file may be longer."""
        return self.values_begin + self.values_length

    def to_bytes(self, magic: bytes = _SEALED) -> bytes:
        """The preamble of a sealed shard, or of an open one."""
        fields = _LAYOUT.pack(magic, FORMAT, *self)
        return (fields + _CHECKSUM.pack(crc32(fields))).ljust(DATA_BEGIN, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes, magic: bytes = _SEALED) -> ShardPreamble:
        """Read the preamble of a sealed shard, or of an open one. Raises ShardError if ``data`` is not a whole one."""
        if len(data) < DATA_BEGIN:
            raise ShardError(f"it has {len(data)} bytes, fewer than the beginning of a shard")
        found, version, *fields = _LAYOUT.unpack_from(data)
        if found in (bytes(len(magic)), _OPEN) and found != magic:
            raise ShardError("it was not finished")
        if found != magic:
            raise ShardError("it is not a shard of a checkpoint of flk")
        if version > FORMAT:
            raise ShardError(f"a newer flk wrote it in format {version}, and this one reads up to {FORMAT}")
        if _CHECKSUM.unpack_from(data, _LAYOUT.size) != (crc32(data[: _LAYOUT.size]),):
            raise ShardError("its beginning is damaged")
        preamble = cls(*fields)
        return preamble._replace(attempt=preamble.attempt.rstrip(b"\0"))


class ShardFile:
    """A shard file that a rank writes, again and again: `begin`, then write to `memory`, then `finish`.

    ``memory`` are the first bytes of the file, mapped: the preamble and the tensors.
    """

    def __init__(self, path: str | Path | None, entries: Sequence[Entry], metadata: Mapping[str, Any]) -> None:
        """Open or make the file, reserve room for the preamble and the tensors, and write the header.

        ``entries`` are the entries of the tensors. ``path`` None: memory of this process that no other process reads.
        Raises OSError, also where the file system has no room: a write to a page that cannot be had would kill the
        process.
        """
        self.entries, self.metadata = tuple(entries), metadata
        if path is None:
            self._file = os.memfd_create("flk-shard") if hasattr(os, "memfd_create") else _unnamed_file()
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = _end(entries)
        header = _header(entries, metadata)
        self._header = (self._end, len(header), crc32(header))
        try:
            if os.fstat(self._file).st_size < self._end:
                host.allocate(self._file, self._end)
            self.memory = mmap.mmap(self._file, self._end)
            self.begin()
            self._write(self._end, header)
        except BaseException:
            os.close(self._file)
            raise

    def begin(self) -> None:
        """Mark the file as unfinished."""
        clear(self.memory)

    def finish(self, *, step: int, number: int, world_size: int, rank: int, values: bytes) -> ShardHeader:
        """Write plain values behind the header, and mark the file as ready to be sealed. Returns all that is in it.

        ``number``: the number of the save in this attempt, since several saves may be after the same step.
        Raises OSError if the file system has no room.
        """
        begin = sum(self._header[:2])
        self._write(begin, values)
        preamble = ShardPreamble(step, number, world_size, rank, *self._header, begin, len(values))
        self.memory[:DATA_BEGIN] = preamble.to_bytes(_OPEN)
        return ShardHeader(step, world_size, rank, (*self.entries, _value_entry(preamble)), self.metadata)

    def close(self) -> None:
        """Unmap and close the file. An unnamed one is freed."""
        with contextlib.suppress(BufferError):  # a tensor still views the memory, which is freed with it
            self.memory.close()
        os.close(self._file)

    def _write(self, at: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written


def shard_size(entries: Sequence[Entry], metadata: Mapping[str, Any]) -> int:
    """The bytes of a shard with these tensors, and without plain values."""
    return _end(entries) + len(_header(entries, metadata))


def value_name(rank: int) -> str:
    """The name of the plain values that a rank has written."""
    return f"flk.{rank}"


def align(position: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-position // ALIGNMENT) * ALIGNMENT


# Files of shards, mapped or read into memory ----------------------------------------------------------------------


def clear(memory: mmap.mmap | memoryview) -> None:
    """Mark a file as one that holds no shard."""
    memory[:DATA_BEGIN] = bytes(DATA_BEGIN)


def is_sealed(memory: mmap.mmap | memoryview) -> bool:
    """Whether a file holds a shard, which is not checked."""
    return memory[: len(_SEALED)] == _SEALED


def sealed_preamble(memory: mmap.mmap | memoryview, attempt: str) -> ShardPreamble:
    """The preamble that seals the shard which a rank has finished; the caller writes it. Raises ShardError."""
    preamble = ShardPreamble.from_bytes(bytes(memory[:DATA_BEGIN]), _OPEN)
    if not DATA_BEGIN <= preamble.header_begin <= preamble.values_begin <= preamble.end <= len(memory):
        raise ShardError("its beginning contradicts its size")
    return preamble._replace(attempt=attempt.encode(), checksum=checksum(memory, DATA_BEGIN, preamble.end))


def read_preamble(memory: mmap.mmap | memoryview | bytes) -> ShardPreamble:
    """The preamble of a whole shard. Does not read the data. Raises ShardError if it is unfinished, cut off or none."""
    preamble = ShardPreamble.from_bytes(bytes(memory[:DATA_BEGIN]))
    if preamble.end > len(memory):
        raise ShardError(f"it has {len(memory)} of its {preamble.end} bytes")
    return preamble


def read_header(memory: mmap.mmap | memoryview | bytes) -> ShardHeader:
    """The header of a whole shard; the data is not read. Raises ShardError if it is unfinished, damaged or no shard."""
    preamble = read_preamble(memory)
    begin, length = preamble.header_begin, preamble.header_length
    text = bytes(memory[begin : begin + length])
    if crc32(text) != preamble.header_checksum:
        raise ShardError("its header is damaged")
    try:
        data = json.loads(text)
        entries, metadata = tuple(map(Entry.from_dict, data["entries"])), data["metadata"]
        contradicts = any(entry.begin + entry.length > begin for entry in entries)
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(f"its header cannot be read: {error}") from error
    if contradicts:
        raise ShardError("its header contradicts the size of the data")
    entries = (*entries, _value_entry(preamble))
    return ShardHeader(preamble.step, preamble.world_size, preamble.rank, entries, metadata)


def verify(memory: mmap.mmap | memoryview | bytes) -> ShardPreamble:
    """The preamble of a whole and undamaged shard. Raises ShardError if it is unfinished, damaged or no shard."""
    preamble = read_preamble(memory)
    check_data(preamble, checksum(memory, DATA_BEGIN, preamble.end))
    return preamble


def check_data(preamble: ShardPreamble, found: int) -> None:
    """Raise ShardError unless ``found`` is the checksum of the shard's data that ``preamble`` states."""
    if found != preamble.checksum:
        raise ShardError("its data has another checksum than its beginning names")


def _end(entries: Sequence[Entry]) -> int:
    return max([DATA_BEGIN, *(entry.begin + entry.length for entry in entries)])


def _header(entries: Sequence[Entry], metadata: Mapping[str, Any]) -> bytes:
    data = {"entries": [vars(entry) for entry in entries], "metadata": metadata}
    return json.dumps(data, separators=(",", ":")).encode()


def _value_entry(preamble: ShardPreamble) -> Entry:
    name = value_name(preamble.rank)
    return Entry(name, (name,), preamble.values_begin, preamble.values_length)


def _unnamed_file() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
