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
from flk.targets import TARGETS
from flk_runtime.contract.failure import ExitCode
from tests.support.api_server import EVENTS, JOBS, FakeApiServer
from tests.support.commands import Run
from tests.unit.flk.cli.outputs import jobs


def state(phase: Phase, reason: str = "", message: str = "", **more: Any) -> State:
    return replace(jobs.running().state(), phase=phase, reason=reason, message=message, **more)


def news(quiet: Quiet, *states: State) -> list[str]:
    return [f"{s.phase} {s.reason}".strip() for s in states if quiet.is_news(s)]


def test_a_state_is_news_once() -> None:
    pending, running = state(Phase.PENDING, "Unschedulable", "0/3 nodes"), state(Phase.RUNNING)
    counting = state(Phase.PENDING, "Unschedulable", "0/4 nodes")
    assert news(Quiet(), pending, pending, counting, running, running) == ["Pending Unschedulable", "Running"]


def test_states_that_alternate_are_reported_ever_more_rarely() -> None:
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


@pytest.mark.parametrize(
    ("text", "met"),
    [("running", True), ("Pending", False), ("condition=Running", True), ("condition=running=False", False)],
)
def test_goals(text: str, met: bool) -> None:
    job = jobs.running()
    assert Goal.parse(text).is_met(job.state(), job.job) is met


@pytest.mark.parametrize("name", ["complete", "Succeeded"])
def test_a_condition_is_met_by_its_own_name_and_by_that_of_pytorchjobs(name: str) -> None:
    done = {"type": "Complete", "status": "True"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gpt"}, "status": {"conditions": [done]}}
    state = jobs.running().state()
    assert Goal.parse(f"condition={name}").is_met(state, job)
    assert not Goal.parse(f"condition={name}").is_met(state, None)
    assert not Goal.parse("condition=Failed").is_met(state, job)


def test_a_misspelt_condition_is_refused_and_one_of_another_controller_is_waited_for(fake: Any, run: Any) -> None:
    code, _, stderr = run("wait", "gpt", "--for", "condition=Succeded")
    assert code == 2
    assert stderr.startswith(
        "error: --for: jobs have no condition Succeded: did you mean Succeeded? flk knows Created,"
    )
    jobs.running().add_to(fake)
    code, _, stderr = run("wait", "gpt", "--for", "condition=example.com/Reviewed", "--timeout", "0")
    assert code == 101
    doubt = "nothing that sets condition=example.com/Reviewed in a PyTorchJob, and waits until something does"
    assert stderr.startswith(
        f"flk: flk knows {doubt}; flk knows Created, Running, Restarting, Succeeded, Failed, Suspended\n"
    )


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("JobCompleted", "Completed"),
        ("JobFailed", "Failed"),
        ("NotSuspended", "Suspended"),
        ("Starting", "Restarting"),
        ("Complet", "Complete"),
    ],
)
def test_a_condition_that_has_a_known_name_in_it_may_be_another_controllers(name: str, near: str) -> None:
    goal = Goal.parse(f"condition={name}")
    of = {"Restarting": "PyTorchJob", "Completed": "JobSet"}.get(near, "Job")
    doubt = f"flk knows nothing that sets condition={name} in a {of}, and waits until something does"
    assert goal.doubt({"kind": of}) == f"{doubt}; did you mean {near}?"


@pytest.mark.parametrize("name", ["Runing", "Complte", "Faild", "Suspeded", "Succeeeded"])
def test_a_condition_that_is_a_known_one_misspelt_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="did you mean"):
        Goal.parse(f"condition={name}")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("complete", {"Job", "TrainJob"}),
        ("Completed", {"JobSet"}),
        ("Running", {"PyTorchJob"}),
        ("Succeeded", {"PyTorchJob", "TrainJob", "JobSet", "Job"}),
        ("FailureTarget", {"Job"}),
        ("StartupPolicyCompleted", {"JobSet"}),
    ],
)
def test_a_condition_is_doubted_in_kinds_of_jobs_that_do_not_have_it(name: str, kinds: set[str]) -> None:
    goal = Goal.parse(f"condition={name}")
    assert {target.kind for target in TARGETS.values() if not goal.doubt({"kind": target.kind})} == kinds


def test_the_doubt_about_a_condition_is_told_once_for_several_jobs_of_a_kind(fake: Any, run: Any) -> None:
    for name in ("a", "b"):
        jobs.running(name=name).add_to(fake)
    _, _, stderr = run("wait", "a", "b", "--for", "condition=Complete", "--timeout", "0")
    assert stderr.count("nothing that sets condition=Complete in a PyTorchJob") == 1


@pytest.mark.parametrize("text", ["", "ready", "condition=", "condition", "Running=True"])
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
    monkeypatch.setattr("flk.jobs.wait.follow.derive", lambda view: stuck)


def test_a_stuck_job_ends_the_wait_unless_it_should_not(stuck_job: None, client: JobClient) -> None:
    assert wait_for(client, "gpt").outcome == Outcome.STUCK
    assert wait_for(client, "gpt", fail_fast=False, timeout=0).outcome == Outcome.TIMEOUT
    assert wait_for(client, "gpt", goal=Goal.parse("stuck"), fail_fast=False).outcome == Outcome.REACHED


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
        (Phase.RUNNING, "Succeeded", 1, "the job goes on; flk wait gpt -n team --for Succeeded waits again"),
        (Phase.RUNNING, "delete", 1, "nobody has deleted it; flk wait gpt -n team --for delete waits again"),
        (Phase.STUCK, None, 1, "flk why gpt -n team shows the cause and what to do; flk wait gpt -n team waits again"),
        (Phase.SUSPENDED, None, 0, "flk resume gpt -n team starts it again"),
        (Phase.SUSPENDED, None, 1, "flk resume gpt -n team starts it again"),
        (Phase.SUSPENDED, "Running", 1, "flk resume gpt -n team starts it again"),
        (Phase.SUSPENDED, "delete", 1, "nobody has deleted it; flk wait gpt -n team --for delete waits again"),
        (Phase.TERMINATING, None, 1, "it is being deleted; flk wait gpt -n team waits again"),
        (Phase.TERMINATING, "delete", 1, "it is being deleted; flk wait gpt -n team --for delete waits again"),
    ],
)
def test_what_is_suggested_when_the_time_is_over(
    client: JobClient, monkeypatch: pytest.MonkeyPatch, phase: Phase, goal: str | None, timeout: float, hint: str
) -> None:
    monkeypatch.setattr("sys.argv", ["flk"])
    with pytest.raises(FlkError) as caught:
        raise_for_state(state(phase), client, Outcome.TIMEOUT, timeout, goal=Goal.parse(goal) if goal else None)
    assert caught.value.hint == hint


def test_a_stuck_job_that_is_not_waited_for_has_not_ended(fake: FakeApiServer, run: Run) -> None:
    jobs.add(fake, "image missing")
    assert run("wait", "gpt", "--timeout", "0")[0] == ExitCode.RUNNING


def test_the_hint_names_what_was_waited_for(fake: FakeApiServer, run: Run) -> None:
    jobs.add(fake, "running")
    code, _, stderr = run("wait", "gpt", "--for", "delete", "--timeout", "1s")
    assert code == ExitCode.TIMEOUT
    assert stderr.endswith("hint: nobody has deleted it; flk wait gpt -n team --for delete waits again\n")
