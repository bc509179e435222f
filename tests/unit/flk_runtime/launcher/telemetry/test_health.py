"""What a launcher finds wrong with its node, from NVML's answers."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.agent import Agent, PodAttempt
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.transport.messages import AttemptStarted


def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(health, "TIMEOUT", 0.05)
    fault = health.find_fault(1, lambda wanted: [str(answers.wait(60))])
    answers.set()
    assert fault == "the driver of the GPUs does not answer for 0.05 s"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_check_that_breaks_blames_no_node() -> None:
    """A driver without one of the functions that are asked."""

    def broken(wanted: int) -> list[str]:
        raise AttributeError("undefined symbol: nvmlDeviceGetCount_v2")

    assert health.find_fault(1, broken) == ""


@pytest.mark.parametrize(("kind", "checked"), [(Kind.CONNECTION, True), (Kind.EXCEPTION, False)])
def test_a_pod_is_checked_before_it_joins_again_after_an_attempt_that_its_node_may_have_ended(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, checked: bool
) -> None:
    reported: queue.SimpleQueue[tuple[list[Failure], int | None]] = queue.SimpleQueue()
    agent = Agent.__new__(Agent)
    agent.settings = Settings(("train.py",), pod=1, pod_name="gpt-worker-1", node="node-b", health=True)
    member = SimpleNamespace(join_next_round=lambda failures, step: reported.put((failures, step)))
    monkeypatch.setattr(agent, "member", member, raising=False)
    monkeypatch.setattr(agent, "stop", None, raising=False)
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
