"""The tree of errors: what may pass is retried, what is wrong for good is final, and the cause is kept."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.checkpoint.memory import PodMemory
from flk_runtime.checkpoint.storage import restore
from flk_runtime.checkpoint.storage.folder import FolderDestination
from flk_runtime.contract.failure import Kind
from flk_runtime.errors import (
    CheckpointError,
    DiscoveryError,
    PeerError,
    RendezvousError,
    RuntimeFailure,
    SetupError,
    StorageError,
    checkpoint_error,
)
from flk_runtime.shared.failure_report import describe


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SetupError, Kind.USAGE),
        (DiscoveryError, Kind.USAGE),
        (RendezvousError, Kind.RENDEZVOUS),
        (CheckpointError, Kind.MISMATCH),
        (StorageError, Kind.STORAGE),
        (PeerError, Kind.PEER),
    ],
)
def test_a_rank_reports_the_kind_of_its_error(error: type[RuntimeFailure], kind: Kind) -> None:
    assert describe(error("why"))["kind"] is kind


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (TimeoutError("no answer within 60 s"), Kind.STORAGE),
        (OSError("the server answered 503 Service Unavailable"), Kind.STORAGE),
        (StorageError("pod 2 does not answer"), Kind.STORAGE),
        (OSError(errno.ESTALE, "Stale file handle"), Kind.IO),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.DISK_FULL),
        (OSError(errno.EACCES, "Permission denied"), Kind.MISMATCH),
        (OSError(errno.EROFS, "Read-only file system"), Kind.MISMATCH),
        (ValueError("it has another shape"), Kind.MISMATCH),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5"), Kind.CONNECTION),
    ],
)
def test_what_happens_to_a_checkpoint_has_the_kind_of_its_cause(cause: Exception, kind: Kind) -> None:
    error = checkpoint_error("cannot restore 'model'", cause)
    error.__cause__ = cause
    assert describe(error)["kind"] is kind


def test_a_folder_that_cannot_be_written_now_may_pass_and_one_that_never_can_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory") as final:
        FolderDestination(tmp_path / "file" / "below").prepare()
    assert describe(final.value)["kind"] is Kind.MISMATCH

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError) as passing:
        FolderDestination(tmp_path).prepare()
    assert describe(passing.value)["kind"] is Kind.IO


def test_storage_that_does_not_answer_at_a_resume_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: Any) -> list[int]:
        raise TimeoutError("timed out")

    monkeypatch.setattr(FolderDestination, "steps", hang)
    with pytest.raises(StorageError, match="cannot read the checkpoints in") as raised:
        restore.find_newest(FolderDestination(tmp_path), print)
    assert describe(raised.value)["kind"] is Kind.STORAGE
    assert isinstance(raised.value.__cause__, TimeoutError)


def test_a_launcher_that_does_not_answer_about_memory_may_pass(tmp_path: Path) -> None:
    memory = PodMemory(str(tmp_path / "none"), 0, 0)
    with pytest.raises(StorageError, match="does not answer") as raised:
        memory.restorable()
    assert describe(raised.value)["kind"] is Kind.STORAGE
