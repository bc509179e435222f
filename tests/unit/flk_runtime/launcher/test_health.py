"""What a launcher finds wrong with its node, from NVML's answers and from folders."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from flk_runtime.contract import user_env
from flk_runtime.launcher import health
from flk_runtime.launcher.settings import Settings


def found(folders: dict[str, str]) -> str:
    return health.find_fault(0, folders, lambda wanted: [])


def test_a_healthy_pod_has_no_fault_and_keeps_no_file(tmp_path: Path) -> None:
    """The folder of the checkpoints need not exist yet, and a place in S3 is none of this node."""
    settings = Settings(("train.py",), memory_root=str(tmp_path), health=True)
    for checkpoint in ("", str(tmp_path / "to" / "come"), "s3://bucket/prefix"):
        assert health.of_pod(settings, {user_env.CHECKPOINT: checkpoint}) == ""
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("number", "is_fault"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSPC, False), (errno.EROFS, False)]
)
def test_errors_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fault: bool) -> None:
    """A full or read-only volume is as full for the pod that would come in place of this one."""

    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(health.os, "fsync", refuse)
    fault = found({"the folder of the checkpoints": str(tmp_path)})
    assert fault == (f"cannot write to the folder of the checkpoints ({tmp_path}): {os.strerror(number)}" * is_fault)


def test_what_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    monkeypatch.setattr(health.os, "fsync", lambda fd: answers.wait(60))
    fault = found({"memory for checkpoints": str(tmp_path)})
    answers.set()
    assert fault == "memory for checkpoints does not answer for 0.05 s"
