"""The parts of checkpoints that a launcher holds, as files in memory (tmpfs), which a killed launcher finds again.

The ranks of the pod write into these files themselves, so their parts are held without a copy. A file is made once and
used again: of each rank whose parts are held here there are two, so that one whole part exists while the next one is
written. A part stays until all pods hold the parts of a newer checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flk_runtime.launcher.memory.plan import CheckpointId, Part
from flk_runtime.system.part import PartError, verify

_FILES: Final = 2  # for each rank whose parts are held
_SUFFIX: Final = ".part"
_LABEL: Final = ".json"  # beside a whole part: which one it is


class NoRoomError(Exception):
    """A part does not fit; the message says why."""


class AttemptEndedError(Exception):
    """The attempt of a rank has ended, so that it gets no file."""


@dataclass(eq=False)
class _File:
    """A file that holds a part, or is free for one."""

    path: Path
    rank: int  # whose parts it is for
    size: int  # bytes that it takes
    part: Part | None = None  # that it holds, whole
    written: bool = False  # somebody writes into it
    attempt: str | None = None  # of the rank of this pod that writes it; None: the launcher of another pod does
    readers: int = 0
    fetched: bool = False  # it is needed for the restoring only


class PartStore:
    """The files of parts in one folder. Any thread may call the methods."""

    def __init__(self, folder: Path, limit: int) -> None:
        """``limit`` is the number of bytes that all files together may take. Raises OSError."""
        self.folder = folder
        self.limit = limit
        self._changed = threading.Condition()
        self._files: list[_File] = []
        self._next = 0  # number of the next file
        self._attempt = ""  # ID of the running attempt, see `keep_only`
        self._ended = ""  # ID of the attempt before
        self._kept: CheckpointId | None = None  # that the running attempt began from
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self, log: Callable[[str], None]) -> None:
        """Find the parts that an earlier launcher of this pod has left, and remove what is not a whole one."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            self._next = max(self._next, int(path.stem) + 1)
            label = path.with_suffix(_LABEL)
            try:
                part = Part.from_json(json.loads(label.read_text()))
                check_part(path, part)
            except FileNotFoundError:  # it was being written
                path.unlink(missing_ok=True)
            except (OSError, ValueError, TypeError) as error:
                log(f"dropped a part of a checkpoint in memory: {error}")
                path.unlink(missing_ok=True)
                label.unlink(missing_ok=True)
            else:
                self._files.append(_File(path, part.rank, path.stat().st_size, part))
        for label in self.folder.glob(f"*{_LABEL}"):
            if not label.with_suffix(_SUFFIX).exists():
                label.unlink(missing_ok=True)

    # What is held ------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """All whole parts."""
        with self._changed:
            return sorted({file.part for file in self._files if file.part})

    def path(self, part: Part) -> Path | None:
        """The file of a part; None if it is not held."""
        with self._changed:
            file = self._find(part)
            return file.path if file else None

    @contextlib.contextmanager
    def reading(self, part: Part) -> Iterator[Path | None]:
        """The file of a part, which nobody writes into meanwhile; None if the part is not held."""
        with self._changed:
            file = self._find(part)
            if file:
                file.readers += 1
        try:
            yield file.path if file else None
        finally:
            if file:
                with self._changed:
                    file.readers -= 1
                    self._changed.notify_all()

    @property
    def used(self) -> int:
        """Bytes that all files take."""
        with self._changed:
            return sum(file.size for file in self._files)

    # Writing -----------------------------------------------------------------------------------------------------

    def reserve(self, rank: int, size: int) -> None:
        """Make the files for the parts of a rank, of ``size`` bytes each. Raises NoRoomError."""
        with self._changed:
            own = [file for file in self._files if file.rank == rank and not file.fetched]
            for file in own:
                if not file.written and not file.readers and not file.part:
                    self._grow(file, size)
            for _ in range(_FILES - len(own)):
                self._make(rank, size)

    def begin(self, rank: int, size: int, timeout: float, *, attempt: str | None = None, fetched: bool = False) -> Path:
        """A file for the next part of a rank. Waits until one is free. End it with `hold` or `cancel`.

        ``attempt``: a rank of this pod writes it, in the attempt with this ID. A rank that was killed while it waited
        must not take the file that its successor needs. ``fetched``: the file exists until `drop_fetched`. Raises
        NoRoomError if the part does not fit, AttemptEndedError if the attempt has ended, and TimeoutError.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                if attempt not in (None, self._attempt):
                    raise AttemptEndedError
                own = [file for file in self._files if file.rank == rank and not file.fetched]
                free = [file for file in own if not (file.part or file.written or file.readers)]
                if free and not fetched:
                    file = free[0]
                    self._grow(file, size)
                    break
                if fetched or len(own) < _FILES:
                    file = self._make(rank, size)
                    file.fetched = fetched
                    break
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise TimeoutError(f"no file for rank {rank} became free within {timeout:.0f} s")
            file.written, file.attempt = True, attempt
            return file.path

    def hold(self, path: Path, part: Part, *, attempt: str | None = None) -> None:
        """Keep the whole part that has been written into a file, unless its attempt has ended meanwhile.

        ``attempt`` is that of `begin`. Raises ValueError if nobody writes into the file in this attempt.
        """
        with self._changed:
            file = self._written(path, attempt)
            if part.checkpoint.written_in == self._ended and part.checkpoint != self._kept:  # it comes too late
                file.written = False
                self._changed.notify_all()
                return
            label = path.with_suffix(_LABEL)
            temporary = label.with_suffix(".tmp")
            temporary.write_text(json.dumps(part))
            os.replace(temporary, label)
            file.written, file.part, file.size = False, part, path.stat().st_size
            self._changed.notify_all()

    def cancel(self, path: Path, *, attempt: str | None = None) -> None:
        """Free a file into which no whole part was written. Raises ValueError as `hold` does."""
        with self._changed:
            self._written(path, attempt).written = False
            self._changed.notify_all()

    # What may go -------------------------------------------------------------------------------------------------

    def keep_only(self, checkpoint: CheckpointId | None, *, attempt: str) -> None:
        """Free all files but those of one checkpoint; None: all files. No rank of this pod runs.

        From now on ranks write in the attempt with the ID ``attempt``; empty: none does. Other checkpoints of the
        attempt before are not held any more, also if a copy arrives later.
        """
        with self._changed:
            self._ended, self._attempt, self._kept = self._attempt, attempt, checkpoint
            for file in self._files:
                file.written = file.written and file.attempt is None
                if file.part and file.part.checkpoint != checkpoint:
                    self._free(file)
            self._changed.notify_all()

    def drop_older(self, checkpoint: CheckpointId, ranks: set[int]) -> None:
        """Free the files of other checkpoints, since all pods hold this one, unless they are of later steps.

        Of the ranks in ``ranks`` parts will be held here; free files of others are removed.
        """
        with self._changed:
            for file in self._files:
                if file.part and file.part.checkpoint != checkpoint and file.part.checkpoint.step <= checkpoint.step:
                    self._free(file)
            self._remove(lambda file: file.fetched or file.rank not in ranks)
            self._changed.notify_all()

    def drop(self, checkpoint: CheckpointId) -> None:
        """Free the files of one checkpoint, of which a part is missing in another pod."""
        with self._changed:
            for file in self._files:
                if file.part and file.part.checkpoint == checkpoint:
                    self._free(file)
            self._changed.notify_all()

    def forget(self, part: Part) -> None:
        """Free the file of a part that is damaged."""
        with self._changed:
            file = self._find(part)
            if file:
                self._free(file)

    def drop_fetched(self) -> None:
        """Remove the files that were needed for the restoring only."""
        with self._changed:
            for file in self._files:
                if file.fetched and file.part:
                    self._free(file)
            self._remove(lambda file: file.fetched)

    def remove(self) -> None:
        """Remove the folder."""
        with self._changed:
            self._files.clear()
            shutil.rmtree(self.folder, ignore_errors=True)

    # With the lock held ------------------------------------------------------------------------------------------

    def _find(self, part: Part) -> _File | None:
        return next((file for file in self._files if file.part == part), None)

    def _written(self, path: Path, attempt: str | None) -> _File:
        file = next((file for file in self._files if file.path == path and file.written), None)
        if file is None or file.attempt != attempt:
            raise ValueError(f"{path} is not being written")
        return file

    def _free(self, file: _File) -> None:
        file.part = None
        file.path.with_suffix(_LABEL).unlink(missing_ok=True)

    def _remove(self, chosen: Callable[[_File], bool]) -> None:
        """Remove free files."""
        gone = [file for file in self._files if chosen(file) and not (file.part or file.written or file.readers)]
        for file in gone:
            file.path.unlink(missing_ok=True)
            self._files.remove(file)

    def _make(self, rank: int, size: int) -> _File:
        path = self.folder / f"{self._next:06d}{_SUFFIX}"
        file = _File(path, rank, 0)
        self._next += 1
        path.touch(mode=0o600)
        try:
            self._grow(file, size)
        except NoRoomError:
            path.unlink()
            raise
        self._files.append(file)
        return file

    def _grow(self, file: _File, size: int) -> None:
        """Have a file take at least ``size`` bytes of memory now: a write to a page that is not there kills a rank."""
        if size <= file.size:
            return
        total = sum(other.size for other in self._files if other is not file) + size
        if total > self.limit:
            raise NoRoomError(f"{mebibytes(total)} are needed and the limit is {mebibytes(self.limit)}")
        try:
            with open(file.path, "r+b") as stream:
                os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            raise NoRoomError(f"{self.folder}: {error.strerror}") from None
        file.size = size


def check_part(path: Path, part: Part) -> None:
    """Raise PartError if a file is not this whole and undamaged part, and OSError if it cannot be read."""
    found = verify(path)
    if found != (part.checkpoint.step, part.checkpoint.world_size, part.rank):
        raise PartError(f"it is the part of rank {found.rank} of {found.world_size} after step {found.step}")


def mebibytes(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
