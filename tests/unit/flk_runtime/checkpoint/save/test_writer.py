"""What all ranks hear of a checkpoint in storage that one of them could not write."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from flk_runtime.checkpoint.save import writer
from flk_runtime.checkpoint.save.writer import StorageWriter
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.checkpoint.storage.manifest import pointer_text
from flk_runtime.errors import CheckpointError, MismatchError, StorageError

NOTHING: Any = []  # the shards of a rank that has none


def header(world_size: int) -> Any:
    return SimpleNamespace(step=1, world_size=world_size, metadata={})


@pytest.fixture
def destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderDestination:
    monkeypatch.setattr(writer, "_READ_LIMIT", 0.0)  # the ranks of a test write one after the other
    made = FolderDestination(tmp_path / "checkpoints")
    made.prepare()
    made.token = "job"
    return made


def writer_of(rank: int, destination: FolderDestination, store: Any, world_size: int = 1) -> StorageWriter:
    """The writer of a rank that waits for no other."""
    return StorageWriter(destination, 2, store, rank, world_size, timeout=0.0)


def test_a_rank_that_does_not_answer_is_named_on_all_ranks(destination: FolderDestination) -> None:
    store = dist.HashStore()
    told = []
    for rank in (0, 1):  # rank 2 hangs
        with pytest.raises(StorageError) as caught:
            writer_of(rank, destination, store, 3).write(header(3), NOTHING)
        told.append(str(caught.value))
        if rank == 0:  # rank 0 has waited for rank 1 in vain, too
            assert told[0].endswith(": waited 0 s for rank 1 to write its file")
            assert list(destination.folder.glob("**/*.distcp")) == []
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (OSError("the bucket does not answer"), StorageError),
        (PermissionError(errno.EACCES, "Permission denied"), MismatchError),
        (ValueError("a value that cannot be written"), MismatchError),
    ],
    ids=["full", "without a number", "not permitted", "not of the storage"],
)
def test_what_is_no_trouble_of_the_storage_is_final(
    destination: FolderDestination, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[CheckpointError]
) -> None:
    def fail(step: int, file: str) -> Any:
        raise error

    monkeypatch.setattr(destination, "create", fail)
    with pytest.raises(kind, match=str(error.args[-1])) as caught:
        writer_of(0, destination, dist.HashStore()).write(header(1), NOTHING)
    assert type(caught.value) is kind


def test_at_the_end_of_a_process_a_rank_waits_for_another_as_long_as_it_takes(
    destination: FolderDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, polled = dist.HashStore(), threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: polled.set())
    first, second = (writer_of(rank, destination, store, 2) for rank in (0, 1))
    with ThreadPoolExecutor() as pool:
        written = pool.submit(second.write, header(2), NOTHING, at_end=True)
        assert polled.wait(30)  # its time limit of no seconds is over
        first.write(header(2), NOTHING, at_end=True)
        written.result(30)
    assert destination.latest() == pointer_text(1).encode()
