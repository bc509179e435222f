"""What a launcher finds wrong with its node, from NVML's answers and from folders."""

from __future__ import annotations

import errno
import os
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.agent import Agent, PodAttempt
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.transport.messages import AttemptStarted


def found(folder: Path) -> str:
    return health.find_fault(0, str(folder), lambda wanted: [])


def test_a_healthy_pod_has_no_fault_and_keeps_no_file(tmp_path: Path) -> None:
    """The folder need not exist yet."""
    for folder in (tmp_path, tmp_path / "to" / "come"):
        assert found(folder) == ""
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
    fault = found(tmp_path)
    assert fault == (f"cannot write to memory for checkpoints ({tmp_path}): {os.strerror(number)}" * is_fault)


def test_what_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    monkeypatch.setattr(health.os, "fsync", lambda fd: answers.wait(60))
    fault = found(tmp_path)
    answers.set()
    assert fault == "memory for checkpoints does not answer for 0.05 s"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_breaks_blames_no_node() -> None:
    """A driver without one of the functions that are asked."""

    def broken(wanted: int) -> list[str]:
        raise AttributeError("undefined symbol: nvmlDeviceGetCount_v2")

    assert health.find_fault(1, "", broken) == ""


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
    monkeypatch.setattr(health, "find_fault", lambda *arguments: "GPU 3 is lost")
    own = Failure(kind, 1, 4)
    attempt = PodAttempt(AttemptStarted(3, "10.0.0.1", 29500, [], "0"))
    attempt.failures.append(own)
    agent._join_next_round(attempt)
    failures, _ = reported.get(timeout=60)
    assert failures[0] == own
    found = [(each.kind, each.attempt, each.node, each.message) for each in failures[1:]]
    assert found == [(Kind.UNHEALTHY, 3, "node-b", "GPU 3 is lost")] * checked
