"""Part files: the share of a checkpoint that one rank holds, as one file that ranks and launchers read alike.

A checkpoint of a job with N ranks consists of N parts. A part is written into a file in tmpfs that is made once and
used again, so the order in the file is the order in which it is written::

    0    prelude   64 bytes: magic, begin and length of the header, CRC-32 of the header
    64   tensors   raw bytes of each piece of a tensor, each begins at a multiple of 64
         values    plain values, each as the bytes of torch.save
         header    JSON: step, ranks, and of each entry its name, its place in the full tensor and in the file

The prelude is cleared before anything else changes and written last, so a file with a valid prelude holds a whole part.
This module uses the standard library only; `flk_runtime.checkpoint.part` reads the tensors.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

FORMAT: Final = 1
ALIGNMENT: Final = 64  # bytes
_MAGIC: Final = b"flk-part"
_PRELUDE: Final = struct.Struct("<8sQQI")  # magic, begin of the header, its length, its CRC-32
_CONTRADICTION: Final = "its header contradicts the size of the data"
_CHUNK: Final = 1 << 24  # bytes over which a checksum is computed at once; zlib releases the GIL meanwhile


class PartError(ValueError):
    """A file that is not a whole, undamaged part."""


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor, or a plain value, in a part file.

    The piece is the box of shape ``size`` that begins at ``offsets`` in the full tensor of shape ``shape``. ``path`` is
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


@dataclass(frozen=True)
class PartHeader:
    """What a part file holds, and who wrote it."""

    step: int  # optimizer steps that the checkpoint was taken after
    world_size: int  # number of parts of the checkpoint
    rank: int  # that wrote the part
    entries: tuple[Entry, ...]
    end: int  # of the last entry, in bytes from the beginning of the file
    checksum: int  # CRC-32 of the bytes from ALIGNMENT to ``end``
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what wrote it: job, code, versions, strategy

    def to_json(self) -> bytes:
        data = {"format": FORMAT, **vars(self), "entries": [vars(entry) for entry in self.entries]}
        return json.dumps(data, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> PartHeader:
        """Raises PartError if ``text`` is not the header of a part in a format that this version reads."""
        with _refusing():
            data = _parse(text)
            entries = tuple(Entry(**{**each, **_tuples(each)}) for each in data.pop("entries"))
            del data["format"]
            return cls(entries=entries, **data)


class PartIdentity(NamedTuple):
    """Which part a file holds."""

    step: int  # optimizer steps that the checkpoint was taken after
    world_size: int  # number of parts of the checkpoint
    rank: int  # that wrote the part


class PartFile:
    """A part file that this process writes, again and again: `begin`, then write to `memory`, then `finish`.

    ``memory`` are the first bytes of the file, mapped: the prelude and the tensors.
    """

    def __init__(self, path: str | Path | None, size: int) -> None:
        """Open or make the file and reserve ``size`` bytes for the prelude and the tensors.

        ``path`` None: memory of this process that no other process reads. Raises OSError, also where the file system
        has no room: a write to a page that cannot be had would kill the process.
        """
        if path is None:
            self._file = os.memfd_create("flk-part") if hasattr(os, "memfd_create") else _unnamed_file()
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.path = path
        size = max(size, ALIGNMENT)
        try:
            if os.fstat(self._file).st_size < size:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file, 0, size)
                else:
                    os.ftruncate(self._file, size)
            self.memory = mmap.mmap(self._file, size)
        except BaseException:
            os.close(self._file)
            raise

    def begin(self) -> None:
        """Mark the file as unfinished."""
        self.memory[: _PRELUDE.size] = bytes(_PRELUDE.size)

    def append(self, at: int, data: bytes) -> None:
        """Write ``data`` behind the mapped bytes, ``at`` bytes from the beginning of the file."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, at)
            view, at = view[written:], at + written

    def finish(
        self,
        *,
        step: int,
        world_size: int,
        rank: int,
        entries: Sequence[Entry],
        metadata: Mapping[str, Any],
    ) -> PartHeader:
        """Compute the checksum of the entries, write the header, and mark the file as whole."""
        end = max([ALIGNMENT, *(entry.begin + entry.length for entry in entries)])
        checksum = self._checksum(end)
        header = PartHeader(step, world_size, rank, tuple(entries), end, checksum, metadata)
        text = header.to_json()
        self.append(end, text)
        self.memory[: _PRELUDE.size] = _PRELUDE.pack(_MAGIC, end, len(text), zlib.crc32(text))
        return header

    def read(self, begin: int, length: int) -> memoryview:
        """``length`` bytes of the file: the mapped memory itself where it holds them."""
        if begin + length <= len(self.memory):
            return memoryview(self.memory)[begin : begin + length]
        return memoryview(os.pread(self._file, length, begin))

    def close(self) -> None:
        """Unmap and close the file. An unnamed one is freed."""
        with contextlib.suppress(BufferError):  # a tensor still views the memory, which is freed with it
            self.memory.close()
        os.close(self._file)

    def _checksum(self, end: int) -> int:
        checksum = 0
        for begin in range(ALIGNMENT, end, _CHUNK):
            stop = min(end, begin + _CHUNK)
            mapped = min(stop, max(begin, len(self.memory)))
            checksum = zlib.crc32(self.read(begin, mapped - begin), checksum)
            checksum = zlib.crc32(self.read(mapped, stop - mapped), checksum)
        return checksum


def align(position: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def read_header(path: str | Path) -> PartHeader:
    """The header of a part file; the data is not read.

    Raises PartError if the file is unfinished, cut off or not a part, and OSError if it cannot be read.
    """
    text, begin = _read_text(path)
    header = PartHeader.from_json(text)
    if header.end != begin or any(entry.begin + entry.length > begin for entry in header.entries):
        raise PartError(_CONTRADICTION)
    return header


def read_length(path: str | Path) -> int:
    """The number of bytes of a part, from the beginning of its file; the file may be longer.

    Raises PartError if the file is unfinished, cut off or not a part, and OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        begin, length, _ = _read_prelude(file.read(_PRELUDE.size))
    return begin + length


def verify(path: str | Path) -> PartIdentity:
    """Which part a file holds, whole and undamaged: its header and its data have their checksums.

    Raises PartError if the file is unfinished, damaged or not a part, and OSError if it cannot be read.
    """
    text, end = _read_text(path)
    with _refusing():
        header = _parse(text)  # without making an Entry of each of thousands
        expected, identity = header["checksum"], PartIdentity(*(header[name] for name in PartIdentity._fields))
        ends = [each["begin"] + each["length"] for each in header["entries"]]
        if header["end"] != end or max(ends, default=0) > end:
            raise PartError(_CONTRADICTION)
    checksum = 0
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as view,
    ):
        for begin in range(ALIGNMENT, end, _CHUNK):
            checksum = zlib.crc32(view[begin : min(end, begin + _CHUNK)], checksum)
    if checksum != expected:
        raise PartError("its data has another checksum than its header names")
    return identity


def _read_text(path: str | Path) -> tuple[bytes, int]:
    """The header of a part file, undamaged, and where it begins. Raises as `read_header`."""
    with open(path, "rb") as file:
        begin, length, checksum = _read_prelude(file.read(_PRELUDE.size))
        file.seek(begin)
        text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise PartError("its header is cut off or damaged")
    return text, begin


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise PartError for a header that has other fields than expected."""
    try:
        yield
    except PartError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise PartError(f"its header cannot be read: {error}") from None


def _parse(text: bytes) -> dict[str, Any]:
    """The fields of a header. Raises PartError if a newer version wrote it, and KeyError, TypeError or ValueError."""
    data: dict[str, Any] = json.loads(text)
    if data["format"] > FORMAT:
        raise PartError(f"a newer flk wrote it in format {data['format']}, and this one reads up to {FORMAT}")
    return data


def _read_prelude(prelude: bytes) -> tuple[int, int, int]:
    """Begin, length and checksum of the header. Raises PartError."""
    if len(prelude) < _PRELUDE.size:
        raise PartError(f"it has {len(prelude)} bytes, fewer than the beginning of a part")
    if prelude == bytes(_PRELUDE.size):
        raise PartError("it was not finished")
    magic, begin, length, checksum = _PRELUDE.unpack(prelude)
    if magic != _MAGIC:
        raise PartError("it is not a part of a checkpoint of flk")
    return begin, length, checksum


def _tuples(entry: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(entry[name]) for name in ("path", "shape", "offsets", "size")}


def _unnamed_file() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
