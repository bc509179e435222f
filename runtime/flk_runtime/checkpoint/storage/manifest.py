"""The manifest of a stored checkpoint: its files with their sizes and checksums, and its writer.

It is the file that is written last, so a checkpoint without one is not whole.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from flk_runtime.contract import VERSION
from flk_runtime.errors import MismatchError
from flk_runtime.system.checksum import crc32

FORMAT: Final = 3
MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"  # torch's file of the Metadata, pickled; its name may go on, with the number of a save
LATEST: Final = "latest"  # the file that names the last good checkpoint, and on a second line its checksum
STEP: Final = re.compile(r"step-([0-9]{9,})")
_CHUNK: Final = 1 << 22  # bytes of a file that are in memory at once


class StoredFile(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """The files and the writer of a stored checkpoint."""

    step: int
    world_size: int  # number of ranks that wrote it
    files: dict[str, StoredFile]
    metadata: Mapping[str, Any] = field(default_factory=dict)  # job, code hash, versions, strategy

    @property
    def metadata_file(self) -> str:
        """The name of torch's file of the Metadata."""
        return next((file for file in self.files if file.startswith(METADATA)), METADATA)

    def to_json(self) -> bytes:
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps(data | {"checksum": _checksum(data)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises CheckpointError for a newer format, and ValueError if ``text`` is no manifest or is damaged."""
        try:
            data = json.loads(text)
            if data.pop("checksum") != _checksum(data):
                raise ValueError(f"{MANIFEST} has another checksum than it says")
            number = data.pop("format")
            if number > FORMAT:
                raise MismatchError(
                    f"flk {data.get('metadata', {}).get('flk', '')} wrote it in format {number}, and flk "
                    f"{VERSION} reads formats up to {FORMAT}; install the newer flk"
                )
            files = {name: StoredFile(*entry) for name, entry in data.pop("files").items()}
            return cls(files=files, **data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{MANIFEST} belongs to no checkpoint of flk: {error}") from error


def _checksum(data: Mapping[str, Any]) -> int:
    return crc32(json.dumps(data, sort_keys=True).encode())


def pointer_text(step: int) -> str:
    """The content of the file LATEST that names a checkpoint."""
    return f"{step_name(step)}\n{crc32(step_name(step).encode()):08x}\n"


def read_pointer(text: bytes) -> int:
    """The step that the content of LATEST names. Raises ValueError if it names none or is damaged.

    A name without a checksum is one that somebody has written by hand, to resume from an older checkpoint.
    """
    name, _, checksum = text.decode().strip().partition("\n")
    match = STEP.fullmatch(name)
    if not match or (checksum and text.decode() != pointer_text(int(match[1]))):
        raise ValueError(f"{LATEST} is damaged: {text[:60]!r}")
    return int(match[1])


def step_name(step: int) -> str:
    """The name of the checkpoint that was taken after this step."""
    return f"step-{step:09d}"


def measure(chunks: Iterable[bytes]) -> StoredFile:
    """Size and checksum of a file that consists of these chunks."""
    size = found = 0
    for chunk in chunks:
        found = crc32(chunk, found)
        size += len(chunk)
    return StoredFile(size, found)


def check_regular(path: Path) -> None:
    """Raise ValueError if a path leads to something that is no file, such as a pipe, whose end may never come."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a file")


def measure_file(path: Path) -> StoredFile:
    """Size and checksum of a file, which is read in parts. Raises ValueError if it is not a file."""
    check_regular(path)
    with open(path, "rb") as file:
        return measure(iter(lambda: file.read(_CHUNK), b""))
