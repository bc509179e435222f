"""Saver: one save after another, each a short stop of the training for the copy and a write in the background."""

from __future__ import annotations

import io
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from flk_runtime.checkpoint.memory import PodMemory, Restorable, SaveKey
from flk_runtime.checkpoint.save.background import BackgroundWriter
from flk_runtime.checkpoint.save.held import HeldSaves
from flk_runtime.checkpoint.save.plan import describe, make_plan
from flk_runtime.checkpoint.save.staging import StagedShard, Staging
from flk_runtime.checkpoint.save.writer import StorageWriter
from flk_runtime.checkpoint.shard import HeldShard
from flk_runtime.checkpoint.state import Chunk
from flk_runtime.checkpoint.storage import Destination
from flk_runtime.contract import user_env
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, MismatchError, RuntimeFailure, StorageError
from flk_runtime.shared.shard_file import ShardHeader

_GOES_ON, _PLANS, _FAILED = range(3)  # answers of a rank before a save
_numbers = itertools.count(1)  # of the saves of this process, which are the same on all ranks


class _Facts(NamedTuple):
    """What a rank knows before a save. The largest of all ranks' numbers counts for each."""

    answer: int
    missing: int  # 1: the memory does not hold its shard of the save before
    problem: int  # 1: there is one with its state
    writes: int  # 1: it still writes an earlier state to storage


class Saver:
    """Saves the state of all ranks: `save` copies and returns, and a thread writes to storage.

    The copy is a shard file in the memory of the pod where its launcher keeps checkpoints (``memory``), else memory of
    this process. Without a ``destination`` nothing is written to storage. With ``separate`` not every save goes there:
    a save in memory never waits for storage, and goes on after a write that failed. ``metadata`` describes the writer
    of the checkpoints. ``timeout``: seconds that a rank waits in the background for another. ``on_saved(step)`` is
    called when a checkpoint is complete: in storage, by the thread, or, if it is only or separately kept there, in
    memory, by `HeldSaves.poll`, `save` or `wait`. ``on_stored(step)`` is called when it is complete in storage.
    ``warn`` is called with the reason where a save failed and training goes on.
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
        self._metadata, self._on_saved, self._on_stored, self._warn = metadata, on_saved, on_stored, warn
        self._rank = process_group.rank()  # the group may be gone at the end of the process
        self._separate = separate and destination is not None
        self.held = HeldSaves(memory, self._note_held, warn, third=self._separate) if memory else None
        """The saves in memory; None if the launcher keeps none, or has refused."""
        self.storage: BackgroundWriter | None = None
        """The writer to storage; None if there is none."""
        if destination is not None:
            destination.token = process_group.on_main(lambda: secrets.token_hex(4))
            writer = StorageWriter(
                destination, keep, process_group.store(), self._rank, process_group.world_size(), timeout
            )
            self.storage = BackgroundWriter(writer, self._note_written)
        self._staging: Staging | None = None
        self._latest: tuple[StagedShard, ShardHeader, float] | None = None  # with the seconds that its copy took
        self._announced = -1  # the step of the latest checkpoint that `on_saved` has heard of
        self._said_slow = False  # that storage is slower than its interval
        self.refusal = ""
        """Why nothing is saved any more; empty: there is a place."""
        self.behind = False
        """Whether the latest save is not in storage, because it was not sent there or the write failed."""

    @property
    def can_save(self) -> bool:
        """Whether there is a place for checkpoints: storage, or memory that has not been refused."""
        return self.held is not None or self.storage is not None

    def save(
        self,
        step: int,
        chunks: Sequence[Chunk],
        plain: Mapping[str, Any],
        problem: RuntimeFailure | None = None,
        *,
        store: bool = True,
    ) -> None:
        """Copy ``chunks`` and ``plain`` of this rank, and write them in the background. Collective.

        The state goes to storage too. Not so if ``store`` is false and the memory keeps it, or if storage
        has an interval of its own and still writes an earlier state. Else the write before is awaited first. Raises
        CheckpointError on all ranks if that write failed, if the chunks are not whole tensors, or if ``plain`` of a
        rank cannot be pickled; whether it can be read back is for `encode` to say. Raises a rank's ``problem`` too: the
        reason why the chunks and ``plain`` are not the whole state.
        """
        number = next(_numbers)
        values, problem = _pickled(plain, problem)
        # The facts that `describe` tells, from the attributes of the chunks.
        layout = [(each.path, each.tensor.dtype, each.shape, each.offsets, each.tensor.shape) for each in chunks]
        staging = self._staging
        ranks = self._agree(_GOES_ON if staging and layout == staging.layout else _PLANS, problem)
        if staging is None or ranks.answer == _PLANS:
            self._pass(self._join())  # it reads files of the plan before
            self.close()
            self._staging = staging = Staging(make_plan(describe(chunks)), self._metadata, layout)
            self._reserve(staging.size(len(values)))
        if self.can_save:
            self._stage(staging, step, number, chunks, values)
            self._store(step, wanted=store, writes=bool(ranks.writes))

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
        if self.storage is None:
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
            self._staging = self._latest = None
        if self.storage is not None:
            self.storage.shard = None

    def store_restored(self, checkpoint: Restorable, *, at_end: bool) -> None:
        """Write the checkpoint that was restored from memory to storage, as memory holds it. Nothing was saved since.

        ``at_end``: as in `wait`.
        Returns when it is complete. Raises CheckpointError on all ranks if it could not be written.
        """
        if self.held is None or self.storage is None:
            return
        open_shard, step, readers = self.held.memory.open_shard, checkpoint.step, checkpoint.readers
        own = ((shard, HeldShard(open_shard(shard))) for shard, reader in enumerate(readers) if reader == self._rank)
        self.storage.writer.write(ShardHeader(step, len(readers), self._rank, (), self._metadata), own, at_end=at_end)
        self.stored = step
        self._on_stored(step)

    def finish_restoring(self) -> None:
        """Say that this rank has restored all it needs: the memory may hold later checkpoints."""
        if self.held:
            self.held.memory.restored()

    def _agree(self, answer: int, problem: RuntimeFailure | None) -> _Facts:
        """End the save before, unless storage may go on with it, and agree with all ranks on this one. Collective.

        Returns what counts of all ranks' facts. Raises CheckpointError on all ranks if the save before ended in an
        error after which training must not go on, and the first ``problem`` of a rank.
        """
        writes = bool(self.held and self.held.has_third and self.storage and self.storage.is_writing)
        error, lost = None if writes else self._join(), self._loss()
        failed = error is not None and not self._passes(error)
        missing = self.held is not None and not self.held.memory.is_held(wait=True)
        own = _Facts(_FAILED if failed else answer, int(missing), int(problem is not None), int(writes))
        ranks = _Facts(*process_group.maximum(*own))
        self._pass(error)
        if ranks.answer == _FAILED and not failed:
            raise StorageError("the save before this one has failed on another rank, whose error says why")
        if lost:
            self._warn(f"{lost}; training goes on, and the next save tries again")
        if self.held:
            self.held.memory.settle(whole=not ranks.missing)
        if ranks.problem:
            _raise_first(problem)
        return ranks

    def _join(self) -> BaseException | None:
        return self.storage.join() if self.storage else None

    def _loss(self) -> str:
        return self.held.loss() if self.held else ""

    def _pass(self, error: BaseException | None) -> None:
        """Go on after a write that failed with ``error``, if training may. Else raise it."""
        if error is None:
            return
        if not self._passes(error):
            raise error
        self.behind = self._separate
        if self._rank == 0:
            self._warn(f"{error}; training goes on, and the next save tries again")

    def _note_held(self, step: int) -> None:
        if self.storage is None or self._separate:
            self._announced = step
            self._on_saved(step)

    def _note_written(self, step: int) -> None:
        self._on_stored(step)
        if not self._separate or step > self._announced:
            self._on_saved(step)

    def _passes(self, error: BaseException) -> bool:
        kept = self._separate and self.held is not None  # it is in memory, whatever happens to storage
        passing = kept or self.storage is None or self.storage.writer.destination.passing_errors
        return passing and isinstance(error, CheckpointError)

    def _stage(self, staging: Staging, step: int, number: int, chunks: Sequence[Chunk], values: bytes) -> None:
        """Copy this rank's shard, and have it held in memory."""
        held, storage, path = self.held, self.storage, None
        if held:
            read = storage.shard.path if storage and storage.shard and storage.is_writing else None
            path = held.path(staging.size(len(values)), read)
        self._latest, save = None, SaveKey(step, number)
        begin = time.monotonic()
        if path or storage:  # else nothing would read the copy
            try:
                shard = staging.shard(path)
                if storage and shard is storage.shard:
                    self._pass(self._join())
                header = shard.copy(chunks, values, save, self._rank, process_group.world_size())
            except OSError as error:
                if held:
                    held.memory.skip(str(error))
                raise StorageError(f"there is no memory for a copy of this rank's state: {error}") from error
            self._latest = (shard, header, time.monotonic() - begin)
        if held:
            held.finish(save, path)

    def _store(self, step: int, *, wanted: bool, writes: bool) -> None:
        """Have the latest copy written to storage if it is ``wanted`` there, unless a rank still ``writes``."""
        stored = self.storage is not None and (wanted or self.held is None) and not writes
        self.behind = self._separate and not stored
        if stored:
            self._begin_write()
        elif wanted and self.storage is not None and not self._said_slow:
            self._said_slow = True
            if self._rank == 0:
                self._warn(
                    f"step {step} is not stored, since storage still writes: it takes longer than its interval; a "
                    "later save is stored (said once)"
                )

    def _begin_write(self, *, at_end: bool = False) -> None:
        """Have the latest copy written to storage, while nothing is written."""
        if self.storage is not None and self._latest is not None:
            self.stored = self._latest[1].step
            self.storage.begin(*self._latest, at_end=at_end)

    def _reserve(self, size: int) -> None:
        """Make room for this rank's shards in the memory of the pods, or do without on all ranks. Collective."""
        if self.held is None or not (refusal := self.held.reserve(size)):
            return
        self.held = None
        self.refusal = "" if self.storage else refusal
        if self._rank == 0:
            nothing = "" if self.storage else ", and nothing is saved, since there is no storage for checkpoints"
            self._warn(f"keeping no checkpoints in memory: {refusal}{nothing}; {user_env.MEMORY_LIMIT} sets the limit")


def _pickled(plain: Mapping[str, Any], problem: RuntimeFailure | None) -> tuple[bytes, RuntimeFailure | None]:
    """``plain`` as `torch.save` writes it, and ``problem``, or the reason why it cannot be written."""
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
    except Exception as failure:  # not raised here: ranks without an error would wait for this one
        problem = problem or MismatchError(f"cannot save a state: {type(failure).__name__}: {failure}")
    return buffer.getvalue(), problem


def _raise_first(problem: RuntimeFailure | None) -> None:
    """Raise the first problem of any rank on all ranks. Collective."""

    def choose(problems: list[RuntimeFailure | None]) -> None:
        for each in problems:
            if each is not None:
                raise each

    process_group.decide(problem, choose)
