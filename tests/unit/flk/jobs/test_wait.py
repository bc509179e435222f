"""Waiting for jobs: goals, jobs that are stuck, and what is worth a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.errors import FlkError, UsageError
from flk.jobs.state import Phase, State
from flk.jobs.wait import Conclusion, Outcome, parse_goal, raise_for_state, wait_for
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.observe.client import JobClient
from tests.support.api_server import EVENTS, FakeApiServer
from tests.unit.flk.cli.outputs import jobs


def state(phase: Phase, reason: str = "", message: str = "", **more: Any) -> State:
    return replace(jobs.running().state(), phase=phase, reason=reason, message=message, **more)


def test_the_time_of_a_wait_is_kept_while_the_api_server_fails(fake: FakeApiServer, kubeconfig: Path) -> None:
    jobs.unschedulable().add_to(fake)
    fake.refused[EVENTS] = (503, "etcd is away")
    pauses: list[float] = []
    client = JobClient(ApiClient(connect(), sleep=pauses.append))
    assert wait_for(client, "gpt", timeout=1).outcome == Outcome.TIMEOUT
    assert pauses
    assert max(pauses) < 1


def test_a_state_is_reported_once() -> None:
    told: list[str] = []
    conclusion = Conclusion(
        None, lambda state: told.append(f"{state.phase} {state.reason}"), lambda state: None, ends_stuck=True
    )
    pending, running = state(Phase.PENDING, "Unschedulable", "0/3 nodes"), state(Phase.RUNNING)
    counting = state(Phase.PENDING, "Unschedulable", "0/4 nodes")
    for each in (pending, pending, counting, running, running):
        conclusion.take(each, {})
    assert told == ["Pending Unschedulable", "Running "]


@pytest.mark.parametrize(
    ("goal", "seen", "met"),
    [("running", Phase.RUNNING, True), ("Pending", Phase.RUNNING, False), ("Running", Phase.SUCCEEDED, True)],
)
def test_a_goal_is_reached_in_its_phase_and_running_also_by_a_job_too_short_to_be_seen(
    goal: str, seen: Phase, met: bool
) -> None:
    waited = Conclusion(parse_goal(goal), lambda state: None, lambda state: None, ends_stuck=True).take(state(seen), {})
    assert bool(waited and waited.outcome == Outcome.REACHED) is met


@pytest.mark.parametrize("text", ["", "ready", "condition=Running", "Deleted"])
def test_what_is_no_goal(text: str) -> None:
    with pytest.raises(UsageError, match="--for: must be one of Queued, Pending"):
        parse_goal(text)


@pytest.fixture
def stuck_job(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job gpt, which stays stuck."""
    jobs.add(fake, "image missing")
    stuck = state(Phase.STUCK, "ImageNotFound", "there is no image trian:1")
    monkeypatch.setattr("flk.jobs.wait.derive", lambda view: stuck)


def test_a_stuck_job_ends_the_wait(stuck_job: None, client: JobClient) -> None:
    assert wait_for(client, "gpt").outcome == Outcome.STUCK
    assert wait_for(client, "gpt", timeout=0).outcome == Outcome.TIMEOUT
    assert wait_for(client, "gpt", goal=Phase.STUCK).outcome == Outcome.REACHED


@pytest.mark.parametrize(
    ("phase", "goal", "timeout", "hint"),
    [
        (Phase.RUNNING, None, 0, "flk wait gpt -n team waits for its end"),
        (Phase.RUNNING, None, 1, "the job goes on; flk wait gpt -n team waits again"),
        (Phase.RUNNING, "Succeeded", 0, "flk wait gpt -n team --for Succeeded waits for that"),
        (Phase.STUCK, None, 1, "flk why gpt -n team shows the cause and what to do; flk wait gpt -n team waits again"),
        (Phase.SUSPENDED, None, 0, "flk resume gpt -n team starts it again"),
        (Phase.TERMINATING, None, 1, "it is being deleted; flk wait gpt -n team waits again"),
    ],
)
def test_what_is_suggested_when_the_time_is_over(
    client: JobClient, monkeypatch: pytest.MonkeyPatch, phase: Phase, goal: str | None, timeout: float, hint: str
) -> None:
    monkeypatch.setattr("sys.argv", ["flk"])
    with pytest.raises(FlkError) as caught:
        raise_for_state(state(phase), client, Outcome.TIMEOUT, timeout, goal=parse_goal(goal) if goal else None)
    assert caught.value.hint == hint
