"""What a launcher finds wrong with its node, from NVML's answers and from folders."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.contract import user_env
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.agent import Agent
from flk_runtime.launcher.processes.pod_attempt import PodAttempt
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.transport.messages import AttemptStarted


def found(folders: dict[str, str]) -> str:
    return health.find_fault(0, folders, lambda wanted: []).message


def test_a_healthy_pod_has_no_fault_and_keeps_no_file(tmp_path: Path) -> None:
    """The folder of the checkpoints need not exist yet, and a place in S3 is none of this node."""
    settings = Settings(("train.py",), memory_root=str(tmp_path), health=True)
    for checkpoint in ("", str(tmp_path / "to" / "come"), "s3://bucket/prefix"):
        assert health.of_pod(settings, {user_env.CHECKPOINT: checkpoint}) == ("", False)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("number", "is_fault"),
    [(errno.EIO, True), (errno.ESTALE, True), (errno.ENXIO, True), (errno.ENOSPC, False), (errno.EROFS, False)],
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


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_fault_of_storage_that_all_pods_share_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """A storage that does not answer does not hide a fault of the node either."""
    answers = threading.Event()
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    monkeypatch.setattr(health.os, "fsync", lambda fd: answers.wait(60))
    monkeypatch.setattr(health, "_gpu_faults", lambda wanted: ["GPU 1 is lost"])
    fault = health.of_pod(Settings(("train.py",), gpus=gpus), {user_env.CHECKPOINT: str(tmp_path)})
    answers.set()
    silent = "the folder of the checkpoints does not answer for 0.05 s"
    assert fault == ((f"GPU 1 is lost; {silent}", False) if gpus else (silent, True))


def test_a_folder_whose_server_has_forgotten_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the folder above it is checked, which is another file system."""

    plain = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path == tmp_path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return plain(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert found({"the folder of the checkpoints": str(tmp_path)}).endswith(os.strerror(errno.ESTALE))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_breaks_blames_no_node() -> None:
    """A driver without one of the functions that are asked."""

    def broken(wanted: int) -> list[str]:
        raise AttributeError("undefined symbol: nvmlDeviceGetCount_v2")

    assert health.find_fault(1, {}, broken) == ("", False)


@pytest.mark.parametrize(("kind", "checked"), [(Kind.CONNECTION, True), (Kind.EXCEPTION, False)])
def test_a_pod_is_checked_before_it_joins_again_after_an_attempt_that_its_node_may_have_ended(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, checked: bool
) -> None:
    reported: queue.SimpleQueue[tuple[list[Failure], int | None]] = queue.SimpleQueue()
    agent = Agent.__new__(Agent)
    agent.settings = Settings(("train.py",), pod=1, pod_name="gpt-worker-1", node="node-b", health=True)
    member = SimpleNamespace(join_next_round=lambda failures, step: reported.put((failures, step)))
    monkeypatch.setattr(agent, "member", member, raising=False)
    monkeypatch.setattr(agent, "wakeup", SimpleNamespace(post=lambda event: None), raising=False)
    monkeypatch.setattr(health, "of_pod", lambda settings, environ: health.Fault("GPU 3 is lost"))
    own = Failure(kind, 1, 4)
    attempt = PodAttempt(AttemptStarted(3, "10.0.0.1", 29500, [], "0"))
    attempt.failures.append(own)
    agent._join_next_round(attempt)
    failures, _ = reported.get(timeout=60)
    assert failures[0] == own
    found = [(each.kind, each.attempt, each.node, each.message) for each in failures[1:]]
    assert found == [(Kind.UNHEALTHY, 3, "node-b", "GPU 3 is lost")] * checked
