"""BackgroundWriter: one write to storage at a time, in a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.checkpoint.save.writer import StorageWriter
from flk_runtime.shared.shard_file import ShardHeader

_PAUSE = 2.0  # until the write begins, in times of the copy: other ranks on these cores may still be copying


class BackgroundWriter:
    """Writes copies of this rank's shard with ``writer``. All methods are called by the thread of the training.

    ``on_written(step)`` is called when a checkpoint is complete in storage, by the thread that writes it.
    """

    def __init__(self, writer: StorageWriter, on_written: Callable[[int], None]) -> None:
        self.writer = writer
        self.shard: StagedShard | None = None
        """The copy that is read, or was read last."""
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()  # whether a caller waits for the write
        self._error: BaseException | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, shard: StagedShard, header: ShardHeader, seconds: float, *, at_end: bool) -> None:
        """Have a copy, which took so many seconds, written by a thread. None writes.

        Where no thread can be started, as at a limit of processes or at the end of the process, it is written before
        this returns.
        """
        self.shard = shard
        self._awaited.clear()
        arguments = (shard, header, seconds * _PAUSE, at_end)
        self._thread = threading.Thread(target=self._write, args=arguments, name="flk-checkpoint", daemon=True)
        try:
            self._thread.start()
            return
        except RuntimeError:
            self._thread = None
        self._awaited.set()
        self._write(*arguments)

    def join(self) -> BaseException | None:
        """Wait until the latest write has ended. Returns the error that prevented it, else None."""
        if self._thread is not None:
            self._awaited.set()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _write(self, shard: StagedShard, header: ShardHeader, pause: float, at_end: bool) -> None:
        """Write the shard, after ``pause`` seconds unless a caller waits for it."""
        self._awaited.wait(pause)
        try:
            self.writer.write(header, [(header.rank, shard)], at_end=at_end)
            self._on_written(header.step)
        except BaseException as error:  # such as a panic in the library of S3, which is written in Rust
            if self._thread is None and not isinstance(error, Exception):
                raise  # the script's handler of a signal has raised it
            self._error = error
