"""Saver: one save after another, each a short stop of the training for the copy and a write in the background."""

from __future__ import annotations

import contextlib
import io
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch

from flk_runtime.checkpoint.memory import PodMemory, Restorable, SaveKey
from flk_runtime.checkpoint.save.plan import Described, describe, make_plan
from flk_runtime.checkpoint.save.staging import StagedShard, Staging
from flk_runtime.checkpoint.save.writer import StorageWriter
from flk_runtime.checkpoint.shard import HeldShard
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage import Destination
from flk_runtime.contract import user_env
from flk_runtime.contract.failure import with_advice
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, MismatchError, RuntimeFailure, StorageError
from flk_runtime.shared.shard_file import ShardHeader

_GROWTH = 1 << 16  # bytes that the plain values may grow by until more memory is reserved
_POLL = 0.1  # seconds
_PAUSE = 2.0  # until the write begins, in times of the copy: other ranks on these cores may still be copying
_WAITS = "a save waits for storage while that still writes"
_GOES_ON, _PLANS, _FAILED = range(3)  # answer of a rank before a save; the largest answer counts
_numbers = itertools.count(1)  # of the saves of this process, which are the same on all ranks


class Saver:
    """Saves the state of all ranks: `save` copies and returns, and a thread writes to storage.

    The copy is a shard file in the memory of the pod where its launcher keeps checkpoints (``memory``), else memory of
    this process. Without a ``destination`` nothing is written to storage. With ``separate`` not every save goes there:
    a save in memory never waits for storage, and goes on after a write that failed. ``metadata`` describes the writer
    of the checkpoints. ``timeout``: seconds that a rank waits in the background for another. ``on_saved(step)`` is
    called when a checkpoint is complete: in storage, by the thread, or, if it is only or separately kept there, in
    memory, by `poll`, `save` or `wait`. ``on_stored(step)`` is called when it is complete in storage. ``warn`` is
    called with the reason where a save failed and training goes on.
    """

    def __init__(
        self,
        destination: Destination | None,
        memory: PodMemory | None,
        *,
        keep: int,
        metadata: Mapping[str, Any],
        timeout: float,
        on_saved: Callable[[int], None],
        warn: Callable[[str], None],
        on_stored: Callable[[int], None] = lambda step: None,
        separate: bool = False,
        stored: int = 0,
    ) -> None:
        """``stored``: the step of the newest checkpoint in storage. Collective."""
        self.stored = stored
        """The step of the latest state that was sent to storage."""
        self._destination, self._memory = destination, memory
        self._metadata, self._on_saved, self._on_stored, self._warn = metadata, on_saved, on_stored, warn
        self._rank, self._world_size = process_group.rank(), process_group.world_size()
        self._writer: StorageWriter | None = None
        if destination is not None:
            destination.token = process_group.on_main(lambda: secrets.token_hex(4))
            self._writer = StorageWriter(
                destination, keep, process_group.store(), self._rank, self._world_size, timeout
            )
        self._staging: Staging | None = None
        self._layout: list[Any] = []  # of the chunks of the latest plan
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()  # whether a caller waits for the write
        self._step: int | None = None  # of the save that is not known to be complete in memory
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()  # for `poll`, which another thread may call while this one waits
        self._error: BaseException | None = None
        self._separate = separate and destination is not None
        self._third = False  # there is room for the next save in memory while the thread reads another one
        self._waits = False  # the log has said that there is no room for a third file after all
        self._latest: tuple[StagedShard, ShardHeader, float] | None = None  # with the seconds that its copy took
        self._read: StagedShard | None = None  # what the thread reads, or has read
        self._announced = -1  # the step of the latest checkpoint that `on_saved` has heard of
        self._slow = False  # the log has said that storage is slower than its interval
        self.can_save = memory is not None or destination is not None
        """Whether there is a place for checkpoints: storage, or memory that has not been refused."""
        self.refusal = ""
        """Why nothing is saved any more; empty: there is a place."""
        self.behind = False
        """Whether the latest save is not in storage, because it was not sent there or the write failed."""

    @property
    def has_storage(self) -> bool:
        """Whether checkpoints go to storage."""
        return self._writer is not None

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the launcher keeps checkpoints, and has not refused."""
        return self._memory is not None

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        plain: Mapping[str, Any],
        problem: RuntimeFailure | None = None,
        *,
        store: bool = True,
    ) -> bool:
        """Copy ``chunks`` and ``plain`` of this rank, and write them in the background. Collective.

        Returns whether the state goes to storage. Not so if ``store`` is false and the memory keeps it, or if storage
        has an interval of its own and still writes an earlier state. Else the write before is awaited first. Raises
        CheckpointError on all ranks if that write failed, if the chunks are not whole tensors, or if ``plain`` of a
        rank cannot be pickled; whether it can be read back is for `encode` to say. Raises a rank's ``problem`` too: the
        reason why the chunks and ``plain`` are not the whole state.
        """
        number = next(_numbers)
        writing = self._third and self._thread is not None and self._thread.is_alive()
        error, lost = None if writing else self._join(), self._loss()
        # The facts that `describe` tells, from the attributes of the chunks.
        layout = [(each.path, each.tensor.dtype, each.shape, each.offsets, each.tensor.shape) for each in chunks]
        changed = self._staging is None or layout != self._layout
        failed = error is not None and not self._passes(error)
        missing = self._memory is not None and not self._memory.is_held(wait=True)
        state = _FAILED if failed else _PLANS if changed else _GOES_ON
        buffer = io.BytesIO()
        try:
            torch.save(plain, buffer)
        except Exception as failure:  # raised below: ranks without an error would wait for this one
            problem = problem or MismatchError(f"cannot save a state: {type(failure).__name__}: {failure}")
        values = buffer.getvalue()
        facts = state, int(missing), int(problem is not None), int(writing)
        state, missing_anywhere, incomplete_anywhere, writing_anywhere = process_group.maximum(*facts)
        self._pass(error)
        if state == _FAILED and not failed:
            raise StorageError("the save before this one has failed on another rank, whose error says why")
        if lost:
            self._warn(f"{lost}; training goes on, and the next save tries again")
        if self._memory:
            self._memory.settle(whole=not missing_anywhere)
        if incomplete_anywhere or self._staging is None:
            _agree(problem)
        if state == _PLANS:
            self._pass(self._join())  # it reads files of the plan before
            self._plan(describe(chunks), len(values))
            self._layout = layout
        if not self.can_save:
            return False
        self._stage(step, number, chunks, values)
        stored = self._writer is not None and (store or self._memory is None) and not writing_anywhere
        self.behind = self._separate and not stored
        if stored:
            self._begin_write()
        elif store and self._writer is not None and not self._slow:
            self._slow = True
            if self._rank == 0:
                self._warn(
                    f"step {step} is not stored, since storage still writes: it takes longer than its interval; a "
                    "later save is stored (said once)"
                )
        return stored

    def poll(self) -> bool:
        """Call ``on_saved`` if the latest checkpoint has become complete in memory, and return at once.

        Returns whether a later call may do so.
        """
        with self._lock:
            if self._step is not None and self._memory and self._memory.is_held(wait=False):
                self._held()
            return self._step is not None

    def watch(self) -> None:
        """Have a thread call `poll` until the latest checkpoint is complete in memory, for a script that does not."""
        if self._step is not None and not (self._watcher and self._watcher.is_alive()):
            self._watcher = threading.Thread(target=self._poll_until_held, name="flk-checkpoint-watch", daemon=True)
            with contextlib.suppress(RuntimeError):  # at a limit of processes: the next save calls it
                self._watcher.start()

    def wait(self, *, together: bool = False, at_end: bool = False) -> None:
        """Wait until the latest save is complete, in storage too if there is one: it is written now if it was not.

        Raises CheckpointError if it failed: on all ranks alike if it is in storage, else on the ranks without a shard.
        ``together``: all ranks wait, and raise it also if one has no shard or there is no place. Collective then.
        ``at_end``: of the process, so that other ranks may begin to write much later.
        """
        if together and self.refusal:
            raise StorageError(f"nothing is saved: {self.refusal}")
        lost, error = self._loss(), self._join()
        if self.behind and self._latest:
            self._pass(error)
            self._begin_write(at_end=at_end)
            error = self._join()
        self.behind = self._separate and error is not None
        if error is not None:
            raise error
        if self._writer is None:
            if together:
                lost = next(filter(None, process_group.all_gather(lost)), "")
            if lost:
                raise StorageError(lost)

    def finish_write(self) -> None:
        """Wait for the write that is going on, if there is one. Raises CheckpointError if it fails."""
        if error := self._join():
            raise error

    def close(self) -> None:
        """Free the copies of the state. Nothing is written now."""
        if self._staging is not None:
            self._staging.close()
            self._staging = self._latest = self._read = None

    def store_restored(self, checkpoint: Restorable, *, at_end: bool) -> None:
        """Write the checkpoint that was restored from memory to storage, as memory holds it. Nothing was saved since.

        ``at_end``: as in `wait`.
        Returns when it is complete. Raises CheckpointError on all ranks if it could not be written.
        """
        assert self._memory is not None  # noqa: S101
        assert self._writer is not None  # noqa: S101
        open_shard, step, readers = self._memory.open_shard, checkpoint.step, checkpoint.readers
        own = ((shard, HeldShard(open_shard(shard))) for shard, reader in enumerate(readers) if reader == self._rank)
        self._writer.write(ShardHeader(step, len(readers), self._rank, (), self._metadata), own, at_end=at_end)
        self.stored = step
        self._on_stored(step)

    def finish_restoring(self) -> None:
        """Say that this rank has restored all it needs: the memory may hold later checkpoints."""
        if self._memory:
            self._memory.restored()

    def _join(self) -> BaseException | None:
        """Wait until the latest save is complete in storage. Returns the error that prevented it, else None."""
        if self._thread is not None:
            self._awaited.set()
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _pass(self, error: BaseException | None) -> None:
        """Go on after a write that failed with ``error``, if training may. Else raise it."""
        if error is None:
            return
        if not self._passes(error):
            raise error
        self.behind = self._separate
        if self._rank == 0:
            self._warn(f"{error}; training goes on, and the next save tries again")

    def _loss(self) -> str:
        """Wait until this rank's shard of the latest save is held in memory. Returns why it is not; empty: it is."""
        with self._lock:
            if self._step is None or self._memory is None:
                return ""
            if self._memory.is_held(wait=True):
                self._held()
                return ""
            step, self._step = self._step, None
            return f"the checkpoint after step {step} is not in memory: {self._memory.refusal}"

    def _poll_until_held(self) -> None:
        with contextlib.suppress(CheckpointError):  # the next save raises it
            while self._step is not None:
                self.poll()
                time.sleep(_POLL)

    def _held(self) -> None:
        step, self._step = self._step, None
        if step is not None and (self._writer is None or self._separate):
            self._announced = step
            self._on_saved(step)

    def _passes(self, error: BaseException) -> bool:
        kept = self._separate and self._memory is not None  # it is in memory, whatever happens to storage
        passing = kept or self._destination is None or self._destination.passing_errors
        return passing and isinstance(error, CheckpointError)

    def _plan(self, structure: list[Described], values: int) -> None:
        """Agree on which rank writes which chunks. ``values``: bytes of the plain values. Collective."""
        plan = make_plan(structure)
        self.close()
        self._staging = Staging(plan, self._metadata)
        self._reserve(self._staging.size(values))

    def _stage(self, step: int, number: int, chunks: Sequence[Chunk], values: bytes) -> None:
        """Copy this rank's shard, and have it held in memory."""
        assert self._staging is not None  # noqa: S101
        path = self._memory_path(self._staging.size(len(values)))
        self._latest = None
        if path is None and self._writer is None:  # nothing would read the copy
            self._step = step
            return
        begin = time.monotonic()
        try:
            shard = self._staging.shard(path)
            if shard is self._read:
                self._pass(self._join())
            header = shard.copy(chunks, values, step=step, number=number, world_size=self._world_size, rank=self._rank)
        except OSError as error:
            if self._memory:
                self._memory.skip(str(error))
            raise StorageError(f"there is no memory for a copy of this rank's state: {error}") from error
        if self._memory:
            with self._lock:
                if path:
                    self._memory.finish(SaveKey(step, number), path)
                self._step = step
        self._latest = (shard, header, time.monotonic() - begin)

    def _begin_write(self, *, at_end: bool = False) -> None:
        """Have the latest shard written to storage by a thread. None writes.

        Where no thread can be started, as at a limit of processes, it is written before this returns; so it is at the
        end of the process, where Python starts none.
        """
        assert self._writer is not None  # noqa: S101
        assert self._latest is not None  # noqa: S101
        shard, header, seconds = self._latest
        self._read, self.stored = shard, header.step
        self._awaited.clear()
        arguments = (self._writer, shard, header, seconds * _PAUSE, at_end)
        is_over = not threading.main_thread().is_alive()  # the functions of atexit are called
        if not is_over:
            self._thread = threading.Thread(target=self._write, args=arguments, name="flk-checkpoint", daemon=True)
            try:
                self._thread.start()
                return
            except RuntimeError as error:
                self._thread = None
                self._warn(f"training waits while step {header.step} is stored: {with_advice(str(error))}")
        self._awaited.set()
        self._write(*arguments)
        if self._error is not None and not isinstance(self._error, Exception):
            stop, self._error = self._error, None
            raise stop from None  # the script's handler of a signal has raised it

    def _memory_path(self, size: int) -> FilePath | None:
        """The file in the memory of the pod for a shard of this size; None if there is none."""
        if self._memory is None:
            return None
        if size > self._memory.size and (refusal := self._memory.reserve({self._rank: size + _GROWTH})):
            self._memory.skip(refusal)
            return None
        read = self._read.path if self._read and self._thread and self._thread.is_alive() else None
        path = self._memory.next_path(read)
        if path == read and self._third:
            refusal = self._memory.add_third()
            path = self._memory.next_path(read)
            if refusal and not self._waits:
                self._waits = True
                self._warn(f"{_WAITS}: {refusal}")
        return path

    def _reserve(self, size: int) -> None:
        """Make room for this rank's shards in the memory of the pods, or do without on all ranks. Collective."""
        if self._memory is None:
            return
        sizes = dict(enumerate(process_group.all_gather(size + _GROWTH)))
        no_third = self._try_to_reserve(self._memory, sizes, counts_third=True) if self._separate else ""
        self._third = self._separate and not no_third
        if self._third:
            return
        refusal = self._try_to_reserve(self._memory, sizes)
        if no_third and not refusal and self._rank == 0:
            self._warn(f"{_WAITS}: {no_third}")
        if refusal:
            self._memory = None
            self.can_save = self._writer is not None
            self.refusal = "" if self._writer else refusal
            if self._rank == 0:
                nothing = "" if self._writer else ", and nothing is saved, since there is no storage for checkpoints"
                limit = f"{user_env.MEMORY_LIMIT} sets the limit, and --memory-path names a local disk instead"
                self._warn(f"keeping no checkpoints in memory: {refusal}{nothing}; {limit}")

    @staticmethod
    def _try_to_reserve(memory: PodMemory, sizes: dict[int, int], *, counts_third: bool = False) -> str:
        """Make room on all ranks or on none. Returns why there is none; empty: there is. Collective."""
        refusals = process_group.gather(memory.reserve(sizes, counts_third=counts_third))
        refusal: str = process_group.on_main(lambda: next((text for text in refusals or () if text), ""))
        if refusal:
            memory.release()
            process_group.maximum(0)  # no rank gives up what another one has reserved since then
        return refusal

    def _write(
        self, writer: StorageWriter, shard: StagedShard, header: ShardHeader, pause: float, at_end: bool
    ) -> None:
        """Write the shard to storage in the background, after ``pause`` seconds unless a caller waits for it."""
        self._awaited.wait(pause)
        try:
            writer.write(header, [(header.rank, shard)], at_end=at_end)
            self._on_stored(header.step)
            if not self._separate or header.step > self._announced:
                self._on_saved(header.step)
        except BaseException as error:
            self._error = error


def _agree(problem: RuntimeFailure | None) -> None:
    """Raise the first problem of any rank on all ranks. Collective."""
    problems = process_group.gather(problem)

    def choose() -> None:
        for each in problems or ():
            if each is not None:
                raise each

    process_group.on_main(choose)
