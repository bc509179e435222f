"""Saves in the memory of pods beside storage that is slow or full, and states that grow beyond the room there is."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
import torch

from flk_runtime.checkpoint.memory import PodMemory
from flk_runtime.checkpoint.save import Saver
from flk_runtime.checkpoint.save import saver as saver_module
from flk_runtime.checkpoint.save.staging import StagedShard
from flk_runtime.checkpoint.state import chunks_of
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.distributed import process_group
from flk_runtime.errors import CheckpointError, MismatchError, StorageError
from flk_runtime.shared.memory_messages import Answer, Files, Request, Reserve
from flk_runtime.shared.shard_file import ShardPreamble
from flk_runtime.wire import Done, Failed


class Memory(PodMemory):
    """The memory of a pod with room for ``limit`` bytes. Its launcher holds at once what is finished."""

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(str(folder / "socket"), 0, 0)
        self.folder, self.limit, self.free = folder, limit, True

    def _send(self, request: Any) -> None:
        self._request: Request = request

    def _receive(self) -> Answer:
        self._waiting = False
        if not isinstance(self._request, Reserve):
            return Done()
        need = (3 if self._request.counts_third else 2) * max(self._request.sizes.values())
        if need > self.limit:
            return Failed(f"{need} bytes are too much")
        if self._request.third and not self.free:
            return Failed("others have filled the file system")
        return Files([str(self.folder / f"{number}.shard") for number in range(3 if self._request.third else 2)])


class Storage(FolderDestination):
    """A folder whose files are written when ``open`` is set, and not if ``full``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.open_, self.full = threading.Event(), False
        self.open_.set()

    @contextlib.contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        self.open_.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        with super().create(step, file) as stream:
            yield stream


class Job:
    """A saver, and what it has said."""

    def __init__(self, folder: Path, storage: Storage | None, *, separate: bool = True, limit: int = 1 << 30) -> None:
        self.lines: list[str] = []
        self.saved: list[int] = []
        self.stored: list[int] = []
        self.memory, self.storage, self.chunk = Memory(folder, limit), storage, torch.zeros(8)
        if storage:
            storage.prepare()
        self.saver = Saver(
            storage,
            self.memory,
            keep=9,
            metadata={},
            timeout=60.0,
            on_saved=self.saved.append,
            warn=self.lines.append,
            on_stored=self.stored.append,
            separate=separate,
        )

    def save(self, step: int, *, store: bool = True, log: str = "") -> bool:
        """Save a state that says of which step it is. Returns whether it goes to storage."""
        self.chunk.fill_(step)
        chunks = chunks_of(("model", "weight"), self.chunk)
        self.saver.save(step, chunks, {"steps": step, "objects": {"log": log}}, store=store)
        return self.saver.stored == step

    def ended(self) -> None:
        """Wait until the write has ended, without hearing of it."""
        assert self.saver.storage
        assert self.saver.storage._thread
        self.saver.storage._thread.join()

    def stored_weight(self, step: int) -> float:
        assert self.storage
        (file,) = self.storage.folder.glob(f"step-{step:09}/*.distcp")
        content = file.read_bytes()
        return 0.0 if torch.full((8,), float(step)).numpy().tobytes() not in content else float(step)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "storage")


def test_a_state_that_outgrows_the_memory_is_not_copied_where_nothing_would_read_the_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies, copy = [], StagedShard.copy

    def counted(shard: StagedShard, *arguments: Any, **named: Any) -> Any:
        copies.append(shard.path)
        return copy(shard, *arguments, **named)

    monkeypatch.setattr(StagedShard, "copy", counted)
    job = Job(tmp_path, None, limit=1 << 18)
    job.save(1)
    for step in (2, 3):
        job.save(step, log="x" * (1 << 18))
    assert copies == [tmp_path / "0.shard"]
    with pytest.raises(StorageError, match=r"after step 3 is not in memory: \d+ bytes are too much"):
        job.saver.wait()
    assert job.saved == [1]
    assert len(job.lines) == 1
    assert "after step 2 is not in memory" in job.lines[0]
    job.save(4)
    job.saver.wait()
    assert job.saved == [1, 4]
    assert len(copies) == 2


def test_a_save_in_memory_never_waits_for_storage(tmp_path: Path, storage: Storage) -> None:
    job = Job(tmp_path, storage)
    storage.open_.clear()
    assert job.save(1)
    for step in range(2, 7):
        assert not job.save(step, store=step > 3)
        assert job.saver.held
        job.saver.held.poll()
    steps = sorted(ShardPreamble.from_bytes(path.read_bytes(), b"flk-open").step for path in tmp_path.glob("*.shard"))
    assert steps == [1, 5, 6], "the third file is what storage reads, and the latest whole one stays"
    assert (job.saved[-1], job.stored) == (5, [])
    assert [line for line in job.lines if "takes longer than its interval" in line] == job.lines
    assert len(job.lines) == 1
    storage.open_.set()
    job.saver.wait()
    assert job.stored == [1, 6], "the latest state is stored at the end, from the copy in memory"
    assert [job.stored_weight(step) for step in job.stored] == [1.0, 6.0]
    assert job.saved == [1, 2, 3, 4, 5, 6]
    assert not job.saver.behind


def test_where_others_have_filled_the_memory_a_save_waits_for_storage(tmp_path: Path, storage: Storage) -> None:
    job = Job(tmp_path, storage)
    job.memory.free = False
    storage.open_.clear()
    assert job.save(1)
    job.save(2, store=False)
    threading.Timer(0.1, storage.open_.set).start()
    for step in (3, 4):
        job.save(step, store=False)
    assert job.stored == [1]
    assert job.stored_weight(1) == 1.0
    job.saver.wait()
    assert (job.saved, job.stored) == ([1, 2, 3, 4], [1, 4])


def test_a_write_that_fails_leaves_the_memory_alone_and_ends_the_run_only_if_it_is_the_last(
    tmp_path: Path, storage: Storage
) -> None:
    job = Job(tmp_path, storage)
    storage.full = True
    assert job.save(1)
    job.ended()
    assert job.save(2)
    assert "No space left on device; training goes on, and the next save tries again" in job.lines[0]
    assert job.saved == [1]
    with pytest.raises(CheckpointError, match="No space left on device"):
        job.saver.wait()
    assert job.saver.behind
    storage.full = False
    job.saver.wait()
    assert job.stored == [2]


def test_a_write_that_fails_ends_the_run_where_the_memory_is_not_apart(tmp_path: Path, storage: Storage) -> None:
    job = Job(tmp_path, storage, separate=False)
    job.save(1)
    job.saver.wait()
    assert job.saved == [1]
    storage.full = True
    job.save(2)
    job.ended()
    with pytest.raises(CheckpointError, match="No space left on device"):
        job.save(3)


def test_at_a_limit_of_processes_a_state_is_stored_while_training_waits(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, storage)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert job.save(1)
    assert job.stored == [1]
    monkeypatch.setattr(storage, "commit", Mock(side_effect=SystemExit(143)))  # of the script's handler of a signal
    with pytest.raises(SystemExit):
        job.save(2)
    storage.full = True
    job.save(2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="No space left on device"):
        job.saver.wait()
    assert job.stored == [1]


def test_a_panic_in_the_library_of_the_storage_is_no_stored_save(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As the libraries that are written in Rust raise it."""

    monkeypatch.setattr(storage, "commit", Mock(side_effect=PanicException("unwrap of None")))
    job = Job(tmp_path, storage)
    job.save(1)
    with pytest.raises(PanicException, match="unwrap"):
        job.saver.wait()
    assert job.stored == []


def test_a_state_of_another_structure_waits_for_the_write_of_the_one_before(tmp_path: Path, storage: Storage) -> None:
    job = Job(tmp_path, storage)
    storage.open_.clear()
    job.save(1)
    job.chunk = torch.zeros(16)
    threading.Timer(0.1, storage.open_.set).start()
    job.save(2, store=False)
    assert job.stored == [1]
    job.saver.wait()
    assert job.stored == [1, 2]


def test_saves_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage: Storage) -> None:
    """Neither in the store of the process group, which is in pod 0, nor in this process."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(process_group, "store", lambda: store)
    job = Job(tmp_path, storage)

    def left() -> tuple[int, int]:
        job.saver.wait()
        gc.collect()
        return store.num_keys(), len(gc.get_objects())

    steps = itertools.count()
    found = []
    gc.collect()
    gc.freeze()  # what is here already is not counted, and its end changes no count
    try:
        for count in (10, 10, 10, 10):
            for step in itertools.islice(steps, count):
                job.save(step)
            found.append(left())
    finally:
        gc.unfreeze()
    assert all(keys == 0 for keys, _ in found)
    # What saves leave is left each time; another test's threads add objects once in a while.
    assert min(after - before for (_, before), (_, after) in itertools.pairwise(found)) < 10


def test_a_save_that_failed_on_another_rank_only_is_an_error_here_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, storage: Storage
) -> None:
    job = Job(tmp_path, storage)
    monkeypatch.setattr(process_group, "maximum", lambda state, *others: [saver_module._FAILED, *others])
    with pytest.raises(StorageError, match="the save before this one has failed on another rank"):
        job.save(1)


def test_a_rank_whose_values_cannot_be_pickled_answers_the_others_before_it_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They would wait for its answer for ever."""
    answers, maximum = [], process_group.maximum
    monkeypatch.setattr(process_group, "maximum", lambda *facts: answers.append(facts[2]) or maximum(*facts))
    job = Job(tmp_path, None)
    job.save(1)
    with pytest.raises(MismatchError, match=r"cannot save a state: .*lambda"):
        job.save(2, log=lambda: 1)  # type: ignore[arg-type]
    assert answers == [0, 1]
