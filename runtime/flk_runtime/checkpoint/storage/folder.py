"""Checkpoints in a folder that all ranks share: ``step-000000100/`` is one, ``latest`` names the last good one.

A checkpoint is written into a folder of its writer, ``.writer-TOKEN``, and renamed when all of its files are there and
synced. A run that begins to save removes the folders of other writers, so the renames of a writer that was paused
meanwhile fail.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flk_runtime.checkpoint.storage.manifest import (
    LATEST,
    MANIFEST,
    STEP,
    StoredFile,
    check_regular,
    measure_file,
    pointer_text,
    step_name,
)
from flk_runtime.errors import MismatchError, checkpoint_error
from flk_runtime.system import host

_TEMPORARY = ".step-*.tmp"
_REPLACED = ".replaced-"  # the beginning of the name of a checkpoint in whose place a new one is put


class FolderDestination:
    """A folder of checkpoints. Methods raise OSError where the file system fails, `prepare` CheckpointError."""

    passing_errors = False  # a disk may stay full, and the training would never be saved

    def __init__(self, path: Path) -> None:
        self.folder = path
        self.place = str(path)
        self.token = ""
        self.damaged: set[int] = set()
        """Steps of checkpoints that were found damaged: not among those that stay when others are saved."""

    def prepare(self) -> None:
        """Make the folder, write a probe, and remove files that killed processes have left. Only rank 0 calls this."""
        probe = self.folder / f".step-probe-{os.getpid()}.tmp"
        try:
            if exists(self.folder / MANIFEST):
                raise MismatchError(
                    f"{self.folder} is a checkpoint, and not a folder of checkpoints: name the folder around it; to "
                    f"resume from this one, write its name, {self.folder.name}, into the file {LATEST} there"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            host.write_synced(probe, b"flk")
            for temporary in self.folder.glob(_TEMPORARY):  # the probe is one of them
                _remove(temporary)
            for replaced in self.folder.glob(f"{_REPLACED}*"):
                self._restore(replaced)
        except OSError as error:
            raise checkpoint_error(
                f"cannot write to the checkpoint folder {self.folder}: {error.strerror or error}", error
            ) from error

    def claim(self) -> None:
        """Keep other writers from completing checkpoints from now on. Only rank 0 calls this."""
        for number, other in enumerate(self.folder.glob(".writer-*")):
            # Renamed first, so that no rename of another writer finds a part of it.
            _remove(other.rename(self.folder / f".step-{self.token}-{number}.tmp"))
        self._own.mkdir(exist_ok=True)

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, whole or not, from the oldest."""
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := STEP.fullmatch(path.name)))

    def latest(self) -> bytes | None:
        """The content of the file that names the last good checkpoint; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / LATEST).read_bytes()
        return None

    def locate(self, step: int) -> str:
        """The name of a checkpoint in messages: its path."""
        return str(self._folder(step))

    @contextlib.contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        """A new file of a checkpoint that is being written. It is synced at the end."""
        folder = self._temporary(step)
        with self._as_owner():
            folder.mkdir(exist_ok=True)
        with open(folder / file, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def new_name(self, file: str, save: int) -> str:
        """The name of a file of a checkpoint that is being written, the ``save``-th of this writer."""
        return file

    def measure_new(self, step: int, file: str) -> StoredFile:
        """Size and checksum of a file that `create` has made."""
        return measure_file(self._temporary(step) / file)

    def open(self, step: int, file: str, begin: int = 0, length: int = -1) -> BinaryIO:
        """A part of a file of a checkpoint, to read; length -1: up to its end."""
        return open_section(self._folder(step) / file, begin, length)

    def measure(self, step: int, file: str) -> StoredFile:
        """Size and checksum of a file of a checkpoint."""
        return measure_file(self._folder(step) / file)

    def commit(self, step: int, manifest: bytes) -> None:
        """Write the manifest, make the checkpoint visible, and move the pointer. Only rank 0 calls this.

        A checkpoint of this step that is there already is replaced. It is never lost: `prepare` finds it again.
        """
        temporary, final, pointer = self._temporary(step), self._folder(step), self._own / LATEST
        replaced = self.folder / f"{_REPLACED}{final.name}"
        with self.create(step, MANIFEST) as stream:
            stream.write(manifest)
        _sync(temporary)
        with self._as_owner():
            host.write_synced(pointer, pointer_text(step).encode())
            if final.exists():
                final.rename(replaced)
            temporary.rename(final)
            _sync(self.folder)
            pointer.replace(self.folder / LATEST)
        _sync(self.folder)
        _remove(replaced)

    def discard(self, step: int) -> None:
        """Remove a checkpoint that could not be written. Only rank 0 calls this."""
        _remove(self._temporary(step))

    def remove(self, step: int) -> None:
        """Remove a checkpoint. It is invisible before its files are removed."""
        temporary = self.folder / f".{self._folder(step).name}.removed.tmp"
        with contextlib.suppress(FileNotFoundError):
            self._folder(step).rename(temporary)
        _remove(temporary)

    def _folder(self, step: int) -> Path:
        return self.folder / step_name(step)

    @property
    def _own(self) -> Path:
        return self.folder / f".writer-{self.token}"

    def _temporary(self, step: int) -> Path:
        return self._own / step_name(step)

    def _restore(self, replaced: Path) -> None:
        """Give a checkpoint its name again, if the one in its place is not there."""
        final = self.folder / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            _remove(replaced)
        elif replaced.exists():
            replaced.rename(final)

    @contextlib.contextmanager
    def _as_owner(self) -> Iterator[None]:
        """Raise the reason where this writer's folder is gone: MismatchError if another writer has removed it.

        Two runs that save in one place would take it from each other for ever.
        """
        try:
            yield
        except FileNotFoundError as error:
            if self._own.exists():
                raise
            if any(other != self._own for other in self.folder.glob(".writer-*")):
                raise MismatchError(f"another run saves in {self.folder} since then") from error
            raise OSError(f"{self.folder} was removed or emptied while the checkpoint was written") from error


def exists(path: Path) -> bool:
    """Whether there is a file or a folder. Raises OSError if that cannot be told, which `Path.exists` hides."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def open_section(path: Path, begin: int = 0, length: int = -1) -> BinaryIO:
    """The ``length`` bytes of a file from ``begin`` on, as a stream to read; length -1: up to its end.

    They are read at once, since torch.load hides why a read has failed. Raises ValueError if it is no file.
    """
    check_regular(path)
    with open(path, "rb") as file:
        file.seek(begin)
        return io.BytesIO(file.read(length))


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
