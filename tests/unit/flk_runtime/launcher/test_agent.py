"""What the launcher of a pod tells the leader."""

from __future__ import annotations

import errno
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import SOURCES, Attempt, JobRecord
from flk_runtime.launcher import agent as launcher
from flk_runtime.launcher.agent import Agent, PodAttempt
from flk_runtime.launcher.preemption import PodPreemption
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport import messages
from flk_runtime.launcher.transport.messages import AttemptStarted, PreemptionStarted
from flk_runtime.shared.progress import ProgressPage


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The launcher of pod 1 in a running attempt. What it reports as failures is in ``reported``."""
    made = Agent.__new__(Agent)
    made.settings = Settings(("train.py",), pod=1)
    made.phase = launcher._Phase.RUNNING
    made.attempt = PodAttempt(AttemptStarted(3, "10.0.0.1", 29500, [], "0"))
    reported: list[Failure] = []
    member = SimpleNamespace(reported=reported, send=lambda message: reported.append(message.failure))
    monkeypatch.setattr(made, "member", member, raising=False)
    return made


def test_a_rank_that_survives_sigkill_while_another_pod_is_preempted_is_reported(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the leader waits for the end of this pod's ranks for ever."""
    survivor = Failure(Kind.UNKILLABLE, 1, message="rank 4, process 31")
    ranks: Any = SimpleNamespace(kill_overdue=lambda: None, abandon_unkillable=lambda: [survivor])
    monkeypatch.setattr(agent, "ranks", ranks, raising=False)
    monkeypatch.setattr(agent, "_watch_attempt", lambda attempt: None)
    assert agent.attempt
    agent.attempt.preemption, agent.attempt.begun = PodPreemption([], 0.0), True
    agent._handle_timeouts()
    assert agent.attempt.failures == [survivor]
    assert agent.member.reported == [survivor]  # type: ignore[attr-defined]


def test_a_change_of_the_job_that_becomes_urgent_is_told_once(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    log, ends = list[str](), list[float]()

    class OneRank(list[Any]):
        end = staticmethod(ends.append)

    for name, value in {
        "ranks": OneRank([SimpleNamespace(progress=ProgressPage.private())]),
        "records": SimpleNamespace(log=log.append),
        "rendezvous": True,
    }.items():
        monkeypatch.setattr(agent, name, value, raising=False)
    for urgent in (False, True):
        agent._handle_event(PreemptionStarted(3, Failure(Kind.RESIZED, 0), urgent))
    assert ends == [agent.settings.grace]
    (line,) = log
    assert line.endswith("; all ranks have to end")


def test_ranks_that_cannot_be_started_are_a_failure_of_the_attempt(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(attempt: AttemptStarted, variables: dict[str, str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/flk-1/attempt_3")

    ranks: Any = SimpleNamespace(start=start, new_failure=lambda kind: Failure(kind, 1))
    for name, value in {
        "ranks": ranks,
        "stop": None,
        "records": SimpleNamespace(log=lambda text: None, ledger=None, saved={}),
        "rendezvous": None,
        "memory": None,
    }.items():
        monkeypatch.setattr(agent, name, value, raising=False)
    agent._start_attempt(AttemptStarted(3, "10.0.0.1", 29500, [], "0-1"))
    (failure,) = agent.member.reported  # type: ignore[attr-defined]
    assert failure.kind is Kind.DISK_FULL
    assert failure.message.startswith("its ranks cannot start: [Errno 28] No space left on device: '/tmp/flk-1")
    assert agent.attempt
    assert agent.attempt.failures == [failure]


def test_a_beginning_that_the_script_corrects_before_its_first_step_is_told_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Trainer restores a checkpoint of its own after flk has told that there is none."""
    page, lines = ProgressPage.private(), list[str]()
    told: list[messages.Message] = []
    ended = Attempt(0, 0.0, 9.0, step=9)
    attempt = agent.attempt = PodAttempt(AttemptStarted(1, "10.0.0.1", 29500, [ended, Attempt(1, 10.0)], "0"))
    records = SimpleNamespace(log=lines.append, write_running=lambda history: None, kept=True)
    for name, value in {
        "ranks": [SimpleNamespace(progress=page)],
        "records": records,
        "rendezvous": True,
    }.items():
        monkeypatch.setattr(agent, name, value, raising=False)
    agent.member.send = told.append  # type: ignore[method-assign, assignment]
    for step, source in ((0, "start"), (7, "")):
        page.restored_from, page.restored = SOURCES.index(source), step
        agent._report_restored(attempt)
        agent._report_restored(attempt)
    assert told == [messages.Restored(1, 0, "start"), messages.Restored(1, 7, "")]
    assert not attempt.begun
    page.record_step(8)
    agent._report_restored(attempt)
    assert attempt.begun
    assert len(told) == 2
    assert (attempt.history[-1].restored, lines) == (7, [])


@pytest.mark.parametrize(("number", "told"), [(signal.SIGTERM, [messages.Stopping()]), (signal.SIGINT, [])])
def test_the_leader_is_told_of_a_launcher_that_has_to_stop(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, number: int, told: list[messages.Message]
) -> None:
    sent: list[messages.Message] = []
    agent.member = SimpleNamespace(send_last=lambda message, seconds: sent.append(message))  # type: ignore[assignment]
    monkeypatch.setattr(agent, "records", SimpleNamespace(finish_stopped=lambda *arguments: 143), raising=False)
    assert agent._finish_stopped(launcher._Stop(number, 0.0)) == 143
    assert sent == told


@pytest.mark.parametrize(
    ("outcome", "least", "stops", "all_know", "expected"),
    [
        ("succeeded", 0, False, False, [15.0, 60.0]),
        ("succeeded", 0, False, True, [15.0]),
        ("succeeded", 2, False, False, [15.0]),
        ("succeeded", 0, True, False, [15.0]),
        ("failed", 0, False, False, [15.0]),
    ],
)
def test_a_pod_that_was_lost_at_the_end_is_told_of_it_when_it_is_back(
    agent: Agent,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    least: int,
    stops: bool,
    all_know: bool,
    expected: list[float],
) -> None:
    """Else it waits for pod 0, which has ended, and fails the job. Where one pod suffices, nobody waits for it."""
    waits: list[float] = []
    said: list[str] = []
    for name, value in {
        "settings": Settings(("train.py",), pods=3, min_pods=least, join_timeout=60.0, lease=15.0),
        "stop": launcher._Stop(signal.SIGTERM, 0.0) if stops else None,
        "records": SimpleNamespace(finish=lambda record, leader: record.code, log=said.append),
        "rendezvous": SimpleNamespace(
            wait_for_members_to_leave=lambda seconds, signals: waits.append(seconds) or all_know
        ),
        "wakeup": SimpleNamespace(signals=[]),
        "memory": None,
        "service": None,
    }.items():
        monkeypatch.setattr(agent, name, value, raising=False)
    assert agent._finish(JobRecord(outcome, 0)) == 0
    assert (waits, len(said)) == (expected, len(expected) - 1)
