"""Writing a stored checkpoint in the background: each rank its own file, then rank 0 makes the checkpoint visible.

The files have the format of `torch.distributed.checkpoint.FileSystemWriter`, so torch reads them without flk. The ranks
tell each other through the process group's store, because a collective in the background could run beside a collective
of the training.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.checkpoint.shard import HeldShard, entry_index, merge_entries
from flk_runtime.checkpoint.storage import Destination
from flk_runtime.checkpoint.storage.manifest import METADATA, Manifest, StoredFile
from flk_runtime.errors import MismatchError, StorageError, checkpoint_error
from flk_runtime.shared.shard_file import Entry, ShardHeader, value_name
from flk_runtime.system.checksum import crc32

_POLL = 0.02  # seconds between two looks at the store at first
_LONGEST_POLL = 0.5
_READ_LIMIT = 5.0  # seconds that rank 0 gives the others to read the result of a save


Shard = StagedShard | HeldShard


class StorageWriter:
    """Writes shards to a destination. `write` runs on every rank; only one runs at a time."""

    def __init__(
        self, destination: Destination, keep: int, store: Any, rank: int, world_size: int, timeout: float
    ) -> None:
        """``timeout``: seconds to wait for a rank."""
        self.destination = destination
        self._keep, self._store, self._timeout = keep, store, timeout
        self._rank, self._world_size = rank, world_size
        self._owner = False  # this rank, rank 0, has claimed the destination
        self._saves = 0
        self._at_end = False  # of the process, in the latest save

    def write(self, header: ShardHeader, shards: Iterable[tuple[int, Shard]], *, at_end: bool = False) -> None:
        """Write this rank's file, and return when all ranks have and the checkpoint is visible.

        ``header`` tells of the checkpoint its step, its number of shards, and what has written it. ``shards``, each
        with the rank that it is of, are this rank's part of them. ``at_end``: this process ends, which others may do
        much later, so it waits for them as long as they take. Raises CheckpointError, the same on all ranks, if a rank
        could not write, or ``shards`` raises an error on one.
        """
        self._at_end = at_end
        self._saves += 1
        key = f"flk/save/{self.destination.token}/{self._saves}/"  # the beginning of the keys of this save
        try:
            self._begin(key)
            answer = self._write_own(header.step, shards)
        except Exception as error:
            answer = _told(error)
        self._store.set(f"{key}{self._rank}", json.dumps(answer))
        if self._rank == 0:
            result = self._complete(key, header)
            self._store.set(f"{key}result", json.dumps(result))
        else:
            # Twice as long as rank 0 waits for a rank, so that it can tell all ranks which one it was.
            result = json.loads(self._get(f"{key}result", "rank 0 to complete the checkpoint", 2 * self._timeout))
        self._leave_together(key)
        if result:
            number = result["errno"]
            cause = OSError(number, os.strerror(number)) if number else OSError(result["error"])
            raise checkpoint_error(result["error"], ValueError() if result["final"] else cause) from cause

    def _begin(self, key: str) -> None:
        """Claim the destination at the first save: a run that only reads there does not keep another from saving."""
        if self._rank > 0:
            self._get(f"{key}begin", "rank 0 to begin the checkpoint")
            return
        try:
            if not self._owner:
                self.destination.claim()
                self._owner = True
        finally:
            self._store.set(f"{key}begin", "")

    def _leave_together(self, key: str) -> None:
        """Give all ranks time to read the result, since rank 0 may take the store with it when it ends.

        Then nobody needs the keys any more. They stay if a rank has not read it in time.
        """
        readers = self._store.add(f"{key}read", 1)
        if self._rank > 0:
            return
        end = time.monotonic() + _READ_LIMIT
        while readers < self._world_size and time.monotonic() < end:
            time.sleep(_POLL)
            readers = self._store.add(f"{key}read", 0)
        if readers == self._world_size:
            for name in ("begin", "result", "read"):
                self._store.delete_key(f"{key}{name}")

    def _write_own(self, step: int, shards: Iterable[tuple[int, Shard]]) -> dict[str, Any]:
        file = self.destination.new_name(f"__{self._rank}_0.distcp", self._saves)
        entries: list[Entry] = []
        writer: Mapping[str, Any] = {}
        with self.destination.create(step, file) as stream:
            counted = _CountedStream(stream)
            for rank, shard in shards:
                writer = shard.writer
                for entry, content in _contents(rank, shard):
                    begin = counted.size
                    if isinstance(content, bytes):
                        counted.write(content)
                    else:
                        counted.save(content)
                    entries.append(replace(entry, begin=begin, length=counted.size - begin))
        stored = StoredFile(counted.size, counted.checksum)
        if self.destination.measure_new(step, file) != stored:
            raise OSError(f"{file} has other bytes after writing than were written: is the storage damaged?")
        return {"file": file, "stored": stored, "entries": [vars(entry) for entry in entries], "writer": writer}

    def _complete(self, key: str, header: ShardHeader) -> dict[str, Any] | None:
        """Make the checkpoint visible when all ranks have written their files. Returns the error if they have not."""
        place = self.destination.locate(header.step)
        answers = []
        failure: dict[str, Any] | None = None
        try:
            for rank in range(self._world_size):
                answers.append(json.loads(self._get(f"{key}{rank}", f"rank {rank} to write its file")))
                self._store.delete_key(f"{key}{rank}")  # it has a line for each tensor
            failure = _first_failure(answers)
            if failure is None:
                self._commit(header, answers)
        except Exception as error:
            failure = _told(error)
        if failure is not None:
            self.destination.discard(header.step)
            return {**failure, "error": f"cannot write the checkpoint {place}: {failure['error']}"}
        self.destination.damaged.discard(header.step)
        try:
            until_now = {step for step in self.destination.steps() if step <= header.step}
            whole = until_now - self.destination.damaged
            for step in sorted(until_now.difference(sorted(whole)[-self._keep :])):
                self.destination.remove(step)
        except OSError:
            pass  # the next save tries again
        return None

    def _commit(self, header: ShardHeader, answers: list[dict[str, Any]]) -> None:
        shards = [[Entry.from_dict(each) for each in answer["entries"]] for answer in answers]
        places = {
            entry_index(entry): _StorageInfo(answer["file"], entry.begin, entry.length)
            for answer, entries in zip(answers, shards, strict=True)
            for entry in entries
        }
        metadata = pickle.dumps(merge_entries(shards, places))
        file = self.destination.new_name(METADATA, self._saves)
        with self.destination.create(header.step, file) as stream:
            stream.write(metadata)
        files = {answer["file"]: StoredFile(*answer["stored"]) for answer in answers}
        files[file] = StoredFile(len(metadata), crc32(metadata))
        writer = next((answer["writer"] for answer in answers if answer["writer"]), header.metadata)
        self.destination.commit(header.step, Manifest(header.step, header.world_size, files, writer).to_json())

    def _get(self, key: str, awaited: str, timeout: float | None = None) -> bytes:
        """The value of a key, when it is there. The store is asked repeatedly, since waiting would lock it."""
        timeout = self._timeout if timeout is None else timeout
        end = time.monotonic() + timeout
        pause = _POLL
        while not self._store.check([key]):
            if not self._at_end and time.monotonic() > end:
                raise StorageError(f"waited {timeout:g} s for {awaited}")
            time.sleep(pause)
            pause = min(_LONGEST_POLL, pause * 1.5)
        return cast("bytes", self._store.get(key))


class _CountedStream(io.RawIOBase):
    """A stream that counts its bytes and computes their checksum."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._error: OSError | None = None
        self.size = 0
        self.checksum = 0

    def save(self, content: Any) -> None:
        """Write the bytes of torch.save. Raises the stream's OSError, in place of which torch raises another error."""
        try:
            torch.save(content, cast("IO[bytes]", self))
        except RuntimeError:
            if self._error is None:
                raise
            raise self._error from None

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            self._error = error
            raise
        self.checksum = crc32(data, self.checksum)
        length = memoryview(data).nbytes
        self.size += length
        return length


def _contents(rank: int, shard: Shard) -> Iterator[tuple[Entry, Any]]:
    """The content of a rank's shard in a file: its tensors, and its values as the bytes of torch.save."""
    yield from shard.tensors()
    own = value_name(rank)
    yield Entry(own, (own,), 0, 0), shard.values


def _first_failure(answers: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The error of the first rank that has one, with the rank if there are several."""
    for rank, answer in enumerate(answers):
        if "error" in answer:
            return {**answer, "error": f"rank {rank}: {answer['error']}"} if len(answers) > 1 else answer
    return None


def _told(error: Exception) -> dict[str, Any]:
    """An error as the ranks tell it each other: its first line, its number, and whether another try cannot help."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    reason = (text.splitlines() or [type(error).__name__])[0]
    final = isinstance(error, MismatchError | pickle.PickleError | TypeError | ValueError)
    return {"error": reason, "errno": getattr(error, "errno", None), "final": final}
