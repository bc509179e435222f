"""Destination: the interface of a place for checkpoints, and `open_destination`, which opens a path or an address."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.checkpoint.storage.manifest import StoredFile
from flk_runtime.contract.pod_layout import is_address
from flk_runtime.errors import MismatchError


class Destination(Protocol):
    """A place for the checkpoints of a run. Methods raise OSError where the place cannot be used;
    `create` and `commit` raise MismatchError where another run has taken it.

    Each writer has a ``token``, so that two never write into one checkpoint. The latest writer that has called `claim`
    is the owner; others cannot complete checkpoints. ``folder`` is that of a place that pods may lack: a volume.
    """

    place: str  # its name in messages
    token: str  # of this run as a writer, the same on all ranks; `claim` and all that write need it
    passing_errors: bool  # whether an error may pass, so that training goes on after a save that failed

    @property
    def folder(self) -> Path | None: ...
    def prepare(self) -> None: ...
    def claim(self) -> None: ...
    def steps(self) -> list[int]: ...
    def latest(self) -> bytes | None: ...
    def locate(self, step: int) -> str: ...
    def new_name(self, file: str, save: int) -> str: ...
    def create(self, step: int, file: str) -> AbstractContextManager[BinaryIO]: ...
    def measure_new(self, step: int, file: str) -> StoredFile: ...
    def open(self, step: int, file: str, begin: int = 0, length: int = -1) -> BinaryIO: ...
    def size(self, step: int, file: str) -> int: ...
    def measure(self, step: int, file: str) -> StoredFile: ...
    def commit(self, step: int, manifest: bytes) -> None: ...
    def discard(self, step: int) -> None: ...
    def remove(self, step: int) -> None: ...
    def set_aside(self, step: int) -> str: ...


def open_destination(place: str) -> Destination:
    """The destination of a folder, or of an address ``s3://BUCKET/PREFIX``. Raises CheckpointError."""
    if is_address(place):
        if not place.startswith("s3://"):
            raise MismatchError(f"checkpoints in {place}: expected a folder, or s3://BUCKET/PREFIX")
        from flk_runtime.checkpoint.storage.s3 import S3Destination

        return S3Destination(place)
    return FolderDestination(Path(place))
