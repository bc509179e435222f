"""The shards of checkpoints that a launcher holds, as files in memory (tmpfs), which a killed launcher finds again.

The ranks of the pod write into these files themselves, so their shards are held without a copy. A file is made once and
used again: of each rank whose shards are held here there are two, so that one whole shard exists while the next one is
written. The beginning of a file says whether it holds a whole shard, and which one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from flk_runtime.contract.failure import Kind
from flk_runtime.contract.quantities import size_text
from flk_runtime.errors import RuntimeFailure, StorageError
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.shared import shard_file
from flk_runtime.shared.shard_file import ShardError, ShardPreamble
from flk_runtime.system import host

T = TypeVar("T")

_FILES: Final = 2  # for each rank whose shards are held; storage may read a third one
_NOBODY: Final = -1
_SUFFIX: Final = ".shard"


class NoRoomError(StorageError):
    """A shard does not fit; the message says why."""


class AttemptEndedError(RuntimeFailure):
    """The attempt that wrote a shard has ended, so that the shard is not held."""

    kind = Kind.STOPPED


@dataclass(eq=False)
class Slot:
    """A file that holds a shard, or is free for one."""

    path: Path
    rank: int  # whose next shard it is for; _NOBODY: for any rank
    memory: mmap.mmap  # the whole file
    size: int  # of the file in bytes, when it is allocated
    shard: ShardId | None = None  # that it held when the launcher looked last, maybe of another rank
    written: bool = False  # the launcher writes into it, or allocates it
    readers: int = 0

    def held(self) -> ShardId | None:
        """The shard that the file holds; None also if a rank has begun to write the next one into it."""
        if self.shard and not shard_file.is_sealed(self.memory):
            self.shard = None
        return self.shard


class ShardStore:
    """The files of shards in one folder. Any thread may call the methods."""

    def __init__(self, folder: Path, limit: int = 0) -> None:
        """``limit`` is the number of bytes that all files together may take. Raises OSError."""
        self.folder = folder
        self.limit = limit
        self._changed = threading.Condition()
        self._slots: list[Slot] = []
        self._next = 0  # number of the next file
        self._attempt = ""  # ID of the running attempt, see `keep_only`
        self._ended: set[str] = set()  # IDs of the attempts before
        self._kept: CheckpointId | None = None  # the latest that is known to be whole
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def load(self, log: Callable[[str], None]) -> None:
        """Find the shards that an earlier launcher of this pod has left, and remove files without a whole shard."""
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                self._next = max(self._next, int(path.stem) + 1)
                slot = Slot(path, _NOBODY, _map(path), path.stat().st_size)
                if shard_file.is_sealed(slot.memory):
                    slot.shard = _id_of(shard_file.verify(slot.memory))
                    slot.rank = slot.shard.rank
                    self._slots.append(slot)
                else:  # it was being written
                    path.unlink()
            except (OSError, ValueError, ShardError) as error:
                log(f"dropped a shard of a checkpoint in memory: {error}")
                with contextlib.suppress(OSError):  # something else has its name
                    path.unlink(missing_ok=True)

    # What is held ------------------------------------------------------------------------------------------------

    def shards(self) -> list[ShardId]:
        """All whole shards."""
        with self._changed:
            return sorted({shard for slot in self._slots if (shard := slot.held())})

    def path(self, shard: ShardId) -> Path | None:
        """The file of a shard; None if it is not held."""
        with self._changed:
            slot = self._find(shard)
            return slot.path if slot else None

    @contextlib.contextmanager
    def reading(self, shard: ShardId) -> Iterator[mmap.mmap | None]:
        """The file of a shard, which the launcher does not write into meanwhile; None if the shard is not held."""
        with self._changed:
            slot = self._find(shard)
            if slot:
                slot.readers += 1
        try:
            yield slot.memory if slot else None
        finally:
            if slot:
                self._release(slot)

    # Writing -----------------------------------------------------------------------------------------------------

    def reserve(
        self,
        attempt: str,
        sizes: Mapping[int, int],
        timeout: float,
        *,
        least: int = 0,
        copied: Collection[ShardId] = (),
        third: Collection[int] = (),
    ) -> None:
        """Have two files for the shards of each rank in ``sizes``, of so many bytes each, and no others.

        ``attempt`` is the ID of the attempt of these ranks: a thread that has waited may come when it is over.

        The ranks in ``third`` have three, since storage reads one of them at its own speed.

        A file that holds a shard of the checkpoint that was restored becomes the second file of a rank: it is needed
        until the next checkpoint is whole, and the rank needs its second file only then. If there are more such files,
        they count too. The shards in ``copied``, which other pods hold, are given up where there is no room for them.

        ``least``: bytes of shards that the limit has to allow, since another pod may become the partner. Waits
        until the launcher writes into no file that changes. Raises NoRoomError if the files do not fit,
        AttemptEndedError and TimeoutError.
        """
        with self._changed:
            self._wait(
                lambda: not any(slot.written and not 0 < sizes.get(slot.rank, 0) <= slot.size for slot in self._slots),
                timeout,
            )
            self._check_attempt(attempt)
            for slot in self._slots:  # all ranks have restored
                if self._is_spare(slot):
                    self._clear(slot)
            dropped: list[Slot] = []
            files, rest, need = self._assign(sizes, copied, dropped, third)
            for slots in (rest, self._slots):  # first those that no rank gets
                if need > self.limit:
                    dropped = [slot for slot in slots if slot.held() in copied]
                    files, rest, need = self._assign(sizes, copied, dropped, third)
            need = max(need, least)
            if need > self.limit:
                raise NoRoomError(_too_much(need, self.limit))
            for slot in dropped:
                self._clear(slot)
                slot.rank = _NOBODY
            self._remove(lambda slot: slot.rank not in sizes and all(slot is not each for _, each in files))
            own = [(found or self._make(rank), rank) for rank, found in files]  # all of them, or it raises
            for slot, rank in own:
                slot.rank = rank
            longer = [slot for slot, rank in own if slot.size < sizes[rank]]
            chosen = [self._begin_allocation(slot, sizes[slot.rank]) for slot in longer]
        self._allocate(chosen, written=False)

    def files_of(self, rank: int) -> list[Path]:
        """The files that are reserved for a rank. A file that holds a shard comes last."""
        with self._changed:
            return [slot.path for slot in sorted(self._own(rank), key=lambda slot: slot.held() is not None)]

    def release(self) -> None:
        """Remove all files without a shard, since nothing will be saved."""
        with self._changed:
            self._remove(lambda slot: True)

    def seal(self, path: Path, attempt: str) -> ShardId:
        """Hold the shard that a rank of this pod has finished in the attempt with this ID.

        Raises ShardError if the rank has not finished one, AttemptEndedError, and ValueError if the file is none of
        these.
        """
        with self._changed:
            slot = next((slot for slot in self._slots if slot.path == path), None)
            if slot is None:
                raise ValueError(f"{path} is no file for shards")
            slot.readers += 1
        try:
            preamble = shard_file.sealed_preamble(slot.memory, attempt)  # computes the checksum, which takes a while
            with self._changed:
                self._check_attempt(attempt)
                return self._hold(slot, preamble)
        finally:
            self._release(slot)

    def begin(self, shard: ShardId, length: int, timeout: float, *, keep: CheckpointId | None = None) -> Slot:
        """A file for a shard that another launcher sends. End it with `hold` or `cancel`.

        ``keep`` is the latest checkpoint that the sender knows to be whole. Waits until a file of the rank is free.
        Raises NoRoomError if the shard does not fit, AttemptEndedError if it comes too late, and TimeoutError.
        """
        with self._changed:
            self._refuse_late(shard)
            if keep:
                self._settle(keep)
            slot = self._wait(lambda: self._slot_for(shard.rank, keep), timeout)
            self._refuse_late(shard)
            self._clear(slot)
            slot.rank = shard.rank
            more = length - slot.size
            if more > 0 and self._total() + more > self.limit:
                self._remove(lambda slot: slot.rank == _NOBODY)
                if self._total() + more > self.limit:
                    raise NoRoomError(_too_much(self._total() + more, self.limit))
            chosen = [self._begin_allocation(slot, max(length, slot.size))]
        self._allocate(chosen, written=True)
        return slot

    def hold(self, slot: Slot, preamble: ShardPreamble) -> None:
        """Hold the whole shard that has been written into a file. Raises AttemptEndedError if it comes too late."""
        with self._changed:
            self.cancel(slot)
            self._refuse_late(_id_of(preamble))
            self._hold(slot, preamble)

    def cancel(self, slot: Slot) -> None:
        """Free a file into which no whole shard was written."""
        with self._changed:
            slot.written = False
            self._changed.notify_all()

    # What may go -------------------------------------------------------------------------------------------------

    def keep_only(
        self, checkpoint: CheckpointId | None, *, attempt: str, others: Collection[CheckpointId] = ()
    ) -> None:
        """Free all files except the files of one checkpoint; None: all files. No rank of this pod runs.

        Shards of ``others`` stay until their files are needed, for the case that the one cannot be read.
        From now on ranks write in the attempt with the ID ``attempt``; empty: none does. Other checkpoints of the
        attempts before are not held any more, also if a copy arrives later.
        """
        with self._changed:
            self._ended.add(self._attempt)
            self._attempt, self._kept = attempt, checkpoint
            for slot in self._slots:
                shard = slot.held()
                if shard is None or shard.checkpoint not in (checkpoint, *others):
                    self._clear(slot)
                    slot.rank = _NOBODY
            self._changed.notify_all()

    def settle(self, checkpoint: CheckpointId, ranks: set[int]) -> None:
        """Free the files of older checkpoints, since all pods hold this one.

        Shards of the ranks in ``ranks`` will be held here; free files of other ranks are removed.
        """
        with self._changed:
            self._settle(checkpoint)
            self._remove(lambda slot: slot.rank not in ranks)

    def forget(self, shard: ShardId) -> None:
        """Free the file of a shard that is damaged."""
        with self._changed:
            slot = self._find(shard)
            if slot:
                self._clear(slot)

    def remove(self) -> None:
        """Remove the folder."""
        with self._changed:
            self._slots.clear()
            shutil.rmtree(self.folder, ignore_errors=True)

    # With the lock held ------------------------------------------------------------------------------------------

    def _own(self, rank: int) -> list[Slot]:
        return [slot for slot in self._slots if slot.rank == rank]

    def _find(self, shard: ShardId) -> Slot | None:
        return next((slot for slot in self._slots if slot.held() == shard), None)

    def _assign(
        self,
        sizes: Mapping[int, int],
        copied: Collection[ShardId],
        dropped: Collection[Slot],
        third: Collection[int],
    ) -> tuple[list[tuple[int, Slot | None]], list[Slot], int]:
        """The files of each rank, None for a new one; the files with shards that no rank gets; and the bytes of all.

        At most one file of a rank is taken because of its shard. Files with shards in ``copied`` are taken last.
        ``dropped`` are files that count as free ones. The ranks in ``third`` get three.
        """
        own = {rank: [slot for slot in self._own(rank) if slot not in dropped] for rank in sizes}
        others = [slot for slot in self._slots if slot.rank not in sizes or slot in dropped]
        held = [slot for slot in others if slot.held() and slot not in dropped]
        held.sort(key=lambda slot: slot.shard not in copied)
        free = [slot for slot in others if slot not in held]
        files: list[tuple[int, Slot | None]] = []
        for rank, slots in own.items():
            found: list[Slot | None] = [*slots]
            count = _FILES + (rank in third)
            while len(found) < count:
                used = sum(slot is not None and slot not in dropped and bool(slot.held()) for slot in found)
                pool = held if not used and held and len(found) == count - 1 else free
                found.append(pool.pop() if pool else None)
            files += [(rank, slot) for slot in found]
        need = sum(max(slot.size, sizes[rank]) if slot else sizes[rank] for rank, slot in files)
        return files, held, need + sum(slot.size for slot in held)

    def _slot_for(self, rank: int, keep: CheckpointId | None) -> Slot | None:
        """An unused file for a copy: a file without a shard, or else a file whose shard is of no whole checkpoint."""
        unused = [slot for slot in self._slots if not (slot.written or slot.readers)]
        own = [slot for slot in unused if slot.rank == rank]
        for slot in own:
            if slot.held() is None:
                return slot
        if len(self._own(rank)) < _FILES:
            free = [slot for slot in unused if slot.rank == _NOBODY and not slot.shard]
            return next(iter([*free, *filter(self._is_spare, unused)]), None) or self._make(rank)
        return next((slot for slot in own if slot.shard and slot.shard.checkpoint not in (keep, self._kept)), None)

    def _wait(self, ready: Callable[[], T | None], timeout: float) -> T:
        """Wait until ``ready`` returns a true value, and return that value."""
        result = self._changed.wait_for(ready, timeout)
        if not result:
            raise TimeoutError(f"no file became free within {timeout:.0f} s")
        return result

    def _is_spare(self, slot: Slot) -> bool:
        """Whether the file holds a shard of an earlier attempt that is not of the checkpoint to restore."""
        shard = slot.held()
        return shard is not None and shard.checkpoint != self._kept and shard.checkpoint.written_in != self._attempt

    def _check_attempt(self, attempt: str) -> None:
        if attempt != self._attempt:
            raise AttemptEndedError

    def _refuse_late(self, shard: ShardId) -> None:
        if shard.checkpoint.written_in in self._ended and shard.checkpoint != self._kept:
            raise AttemptEndedError

    def _settle(self, checkpoint: CheckpointId) -> None:
        """Free the files of checkpoints that are older than this one: all except later ones of the running attempt.

        Only ranks and `begin` write into the files: a rank may have begun to do so.
        """
        if checkpoint == self._kept or checkpoint.written_in != self._attempt:
            return
        self._kept = checkpoint
        for slot in self._slots:
            other = slot.shard.checkpoint if slot.shard else checkpoint
            if other.written_in != checkpoint.written_in or other.number < checkpoint.number:
                slot.shard = None
        self._changed.notify_all()

    def _hold(self, slot: Slot, preamble: ShardPreamble) -> ShardId:
        slot.memory[: shard_file.DATA_BEGIN] = preamble.to_bytes()
        slot.shard = _id_of(preamble)
        return slot.shard

    def _clear(self, slot: Slot) -> None:
        slot.shard = None
        shard_file.clear(slot.memory)

    def _remove(self, chosen: Callable[[Slot], bool]) -> None:
        """Remove free files."""
        gone = [slot for slot in self._slots if chosen(slot) and not (slot.held() or slot.written or slot.readers)]
        for slot in gone:
            slot.path.unlink(missing_ok=True)
            self._slots.remove(slot)

    def _release(self, slot: Slot) -> None:
        with self._changed:
            slot.readers -= 1
            self._changed.notify_all()

    def _make(self, rank: int) -> Slot:
        """A new file, with room for the beginning of a shard."""
        path = self.folder / f"{self._next:06d}{_SUFFIX}"
        self._next += 1
        try:
            self._fallocate(path, shard_file.DATA_BEGIN)
        except NoRoomError:
            path.unlink(missing_ok=True)
            raise
        slot = Slot(path, rank, _map(path), shard_file.DATA_BEGIN)
        self._slots.append(slot)
        return slot

    def _total(self) -> int:
        return sum(slot.size for slot in self._slots)

    def _begin_allocation(self, slot: Slot, size: int) -> tuple[Slot, int]:
        """Count the bytes of a file that `_allocate` makes longer, and have nobody else use it meanwhile."""
        before, slot.size, slot.written = slot.size, size, True
        return slot, before

    # Without the lock --------------------------------------------------------------------------------------------

    def _allocate(self, chosen: Sequence[tuple[Slot, int]], *, written: bool) -> None:
        """Have files take their memory now: a write to a page that is not there kills a rank. Takes a while.

        ``chosen`` are results of `_begin_allocation`. ``written``: the launcher writes into them next. Raises
        NoRoomError.
        """
        done = 0
        try:
            for slot, _ in chosen:
                if slot.size > len(slot.memory):
                    self._fallocate(slot.path, slot.size)
                done += 1
        finally:
            with self._changed:
                for index, (slot, before) in enumerate(chosen):
                    slot.written = written and done == len(chosen)
                    if index >= done:
                        os.truncate(slot.path, before)
                        slot.size = before
                    elif slot.size > len(slot.memory):
                        slot.memory = _map(slot.path)  # readers of the file have the old mapping of the same memory
                self._changed.notify_all()

    def _fallocate(self, path: Path, size: int) -> None:
        """Give a file at least so many bytes. It is made if it is not there."""
        try:
            # To be read, and not to append: where a file system cannot allocate, glibc reads and writes at positions.
            with open(path, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o600)) as stream:
                host.allocate(stream.fileno(), size)
        except OSError as error:
            raise NoRoomError(f"{self.folder}: {size_text(size)} more: {error.strerror}") from error


def _too_much(need: int, limit: int) -> str:
    return f"{size_text(need)} are needed and the limit is {size_text(limit)}"


def check_shard(preamble: ShardPreamble, shard: ShardId) -> None:
    """Raise ShardError if ``preamble`` is not the preamble of this shard."""
    if _id_of(preamble) != shard:
        raise ShardError(f"it is the shard of rank {preamble.rank} of {preamble.world_size} after step {preamble.step}")


def _id_of(preamble: ShardPreamble) -> ShardId:
    checkpoint = CheckpointId(preamble.attempt.decode(), preamble.step, preamble.world_size, preamble.number)
    return ShardId(checkpoint, preamble.rank)


def _map(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)
