"""Waiting for jobs: goals, jobs that are stuck, and what is worth a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flk.errors import FlkError
from flk.jobs.state import Phase, State
from flk.jobs.wait import Goal, Outcome, Quiet, raise_for_state, wait_for
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.observe.client import JobClient
from tests.support.api_server import EVENTS, JOBS, FakeApiServer
from tests.unit.flk.cli.outputs import jobs


def state(phase: Phase, reason: str = "", message: str = "", **more: Any) -> State:
    return replace(jobs.running().state(), phase=phase, reason=reason, message=message, **more)


def news(quiet: Quiet, *states: State) -> list[str]:
    return [f"{s.phase} {s.reason}".strip() for s in states if quiet.is_news(s)]


def test_a_state_is_news_once() -> None:
    pending, running = state(Phase.PENDING, "Unschedulable", "0/3 nodes"), state(Phase.RUNNING)
    counting = state(Phase.PENDING, "Unschedulable", "0/4 nodes")
    assert news(Quiet(), pending, pending, counting, running, running) == ["Pending Unschedulable", "Running"]


def test_states_that_alternate_are_reported_rarely() -> None:
    now = [0.0]
    quiet = Quiet(lambda: now[0])
    count = 0
    running, restarting = state(Phase.RUNNING), state(Phase.RESTARTING)
    for number in range(12 * 3600):
        now[0] = float(number)
        count += quiet.is_news(running if number % 20 < 10 else restarting)
    assert 20 < count < 60


def test_the_time_of_a_wait_is_kept_while_the_api_server_fails(fake: FakeApiServer, kubeconfig: Path) -> None:
    jobs.unschedulable().add_to(fake)
    fake.refused[EVENTS] = (503, "etcd is away")
    pauses: list[float] = []
    client = JobClient(ApiClient(connect(), sleep=pauses.append))
    assert wait_for(client, "gpt", timeout=1).outcome == Outcome.TIMEOUT
    assert pauses
    assert max(pauses) < 1


def test_attempts_with_one_cause_are_one_line() -> None:
    quiet = Quiet()
    lines = 0
    for number in range(2, 40):
        history = jobs.failed(jobs.RAISED, *[jobs.RAISED] * number).state().attempts
        lines += quiet.is_news(state(Phase.RUNNING, attempts=history))
        lines += quiet.is_news(state(Phase.RESTARTING, attempts=history))
    assert lines == 2


@pytest.mark.parametrize(("text", "met"), [("running", True), ("Pending", False)])
def test_goals(text: str, met: bool) -> None:
    job = jobs.running()
    assert Goal.parse(text).is_met(job.state(), job.job) is met


@pytest.mark.parametrize("text", ["", "ready", "condition=Running"])
def test_what_is_no_goal(text: str) -> None:
    with pytest.raises(ValueError, match="must be Queued, Pending"):
        Goal.parse(text)


def test_a_job_that_has_succeeded_has_run() -> None:
    assert Goal.parse("Running").is_met(jobs.succeeded().state(), {})


def test_deletion_is_waited_for_beyond_the_end(fake: FakeApiServer, client: JobClient) -> None:
    jobs.add(fake, "succeeded")
    waited = wait_for(client, "gpt", goal=Goal.parse("delete"), timeout=0)
    assert waited.outcome == Outcome.FINISHED
    assert waited.state.phase == Phase.SUCCEEDED
    waited = wait_for(client, "gpt", uid="an-earlier-one", goal=Goal.parse("delete"))
    assert waited.outcome == Outcome.REACHED


@pytest.fixture
def stuck_job(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job gpt, which stays stuck."""
    jobs.add(fake, "image missing")
    stuck = state(Phase.STUCK, "ImageNotFound", "there is no image trian:1")
    monkeypatch.setattr("flk.jobs.wait.derive", lambda view: stuck)


def test_a_stuck_job_ends_the_wait(stuck_job: None, client: JobClient) -> None:
    assert wait_for(client, "gpt").outcome == Outcome.STUCK
    assert wait_for(client, "gpt", timeout=0).outcome == Outcome.TIMEOUT
    assert wait_for(client, "gpt", goal=Goal.parse("stuck")).outcome == Outcome.REACHED


def test_a_stuck_job_is_waited_for_until_it_is_deleted(stuck_job: None, fake: FakeApiServer, client: JobClient) -> None:
    assert wait_for(client, "gpt", goal=Goal.parse("delete"), timeout=0).outcome == Outcome.TIMEOUT
    gone = b'{"type": "DELETED", "object": {"metadata": {"name": "gpt", "uid": "%s", "resourceVersion": "201"}}}\n'
    fake.watches[JOBS].append([gone.replace(b"%s", fake.objects[JOBS]["gpt"]["metadata"]["uid"].encode())])
    assert wait_for(client, "gpt", goal=Goal.parse("delete")).outcome == Outcome.REACHED


@pytest.mark.parametrize(
    ("phase", "goal", "timeout", "hint"),
    [
        (Phase.RUNNING, None, 0, "flk wait gpt -n team waits for its end"),
        (Phase.RUNNING, None, 1, "the job goes on; flk wait gpt -n team waits again"),
        (Phase.RUNNING, "Succeeded", 0, "flk wait gpt -n team --for Succeeded waits for that"),
        (Phase.RUNNING, "delete", 1, "nobody has deleted it; flk wait gpt -n team --for delete waits again"),
        (Phase.STUCK, None, 1, "flk why gpt -n team shows the cause and what to do; flk wait gpt -n team waits again"),
        (Phase.SUSPENDED, None, 0, "flk resume gpt -n team starts it again"),
        (Phase.SUSPENDED, "delete", 1, "nobody has deleted it; flk wait gpt -n team --for delete waits again"),
        (Phase.TERMINATING, None, 1, "it is being deleted; flk wait gpt -n team waits again"),
    ],
)
def test_what_is_suggested_when_the_time_is_over(
    client: JobClient, monkeypatch: pytest.MonkeyPatch, phase: Phase, goal: str | None, timeout: float, hint: str
) -> None:
    monkeypatch.setattr("sys.argv", ["flk"])
    with pytest.raises(FlkError) as caught:
        raise_for_state(state(phase), client, Outcome.TIMEOUT, timeout, goal=Goal.parse(goal) if goal else None)
    assert caught.value.hint == hint
