"""What a launcher finds wrong with its node, from NVML's answers and from folders."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import user_env
from flk_runtime.launcher import health
from flk_runtime.launcher.health import Gpu
from flk_runtime.launcher.settings import Settings


def found(gpus: int = 0, folders: dict[str, str] | None = None, seen: list[Gpu] | None = None) -> str:
    return health.find_fault(gpus, folders or {}, lambda: seen)


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        ([Gpu(), Gpu()], ""),
        ([Gpu()], "1 GPU of 2 can be seen"),
        ([Gpu(), Gpu(lost=True, error=15)], "GPU 1 is lost: it has fallen off the bus"),
        ([Gpu(error=999), Gpu()], "GPU 0 does not answer (NVML error 999)"),
        ([Gpu(remap_pending=True), Gpu()], "GPU 0 had an uncorrectable memory error and needs a reset"),
        (
            [Gpu(remap_pending=True, remap_failed=True), Gpu()],
            "GPU 0 has memory with uncorrectable errors that cannot be replaced",
        ),
        ([Gpu(), Gpu(xid="79: it has fallen off the bus")], "GPU 1 reported Xid 79: it has fallen off the bus"),
        (None, ""),  # no NVML
    ],
)
def test_gpus(seen: list[Gpu] | None, fault: str) -> None:
    assert found(2, seen=seen) == fault


class Nvml:
    """The library as it answers on a node with two GPUs; ``answers`` are the return codes of its functions."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.closed = False

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return self.answers.get("count", 0)

    def nvmlInit_v2(self) -> int:
        return self.answers.get("init", 0)

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 4096 + index
        return self.answers.get("handle", 0) if index else 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        assert ctypes.sizeof(memory._obj) == 24
        return self.answers.get("memory", 0) if handle.value == 4097 else 0

    def nvmlDeviceGetRemappedRows(self, handle: ctypes.c_void_p, *rows: Any) -> int:
        for row, value in zip(rows, (0, 1, self.answers.get("pending", 0), self.answers.get("failed", 0)), strict=True):
            row._obj.value = value
        return 0


@pytest.mark.parametrize(
    ("answers", "second"),
    [
        ({}, Gpu()),
        ({"handle": 15}, Gpu(lost=True, error=15)),
        ({"memory": 999}, Gpu(error=999)),
        ({"pending": 1}, Gpu(remap_pending=True)),
        ({"failed": 1}, Gpu(remap_failed=True)),
        ({"init": 9}, None),
        ({"count": 9}, None),
    ],
)
def test_answers_of_nvml(monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], second: Gpu | None) -> None:
    nvml = Nvml(**answers)
    monkeypatch.setattr(health.ctypes, "CDLL", lambda name: nvml)
    seen = health.read_gpus()
    assert (seen[1] if seen else None) == second
    assert nvml.closed == ("init" not in answers)


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
    fault = found(folders={"the folder of the checkpoints": str(tmp_path)})
    assert fault == (f"cannot write to the folder of the checkpoints ({tmp_path}): {os.strerror(number)}" * is_fault)


def test_what_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    monkeypatch.setattr(health.os, "fsync", lambda fd: answers.wait(60))
    fault = found(folders={"memory for checkpoints": str(tmp_path)})
    answers.set()
    assert fault == "memory for checkpoints does not answer for 0.05 s"
