"""Commands on many jobs: few requests however many jobs there are, output in order, every failure named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flk.errors import ApiError
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.observe.client import JobClient
from flk.observe.source import ListSource
from flk_runtime.contract import ExitCode
from tests.support.api_server import EVENTS, JOBS, PODS, FakeApiServer
from tests.support.commands import Run
from tests.support.jobs import JobBuilder

COUNT = 40


def name(number: int) -> str:
    return f"j{number:02d}"


@pytest.fixture
def many(fake: FakeApiServer) -> FakeApiServer:
    """Suspended jobs, but the tenth, which has failed, and the twentieth, which has succeeded."""
    for number in range(COUNT):
        builder = JobBuilder(1, name=name(number))
        builder.job["metadata"]["labels"]["team"] = "nlp"
        builder.job["spec"]["runPolicy"]["suspend"] = number not in (10, 20)
        if number in (10, 20):
            builder.condition("Succeeded" if number == 20 else "Failed").all("ended", 0 if number == 20 else 1)
        builder.add_to(fake)
        fake.written[f"{name(number)}-worker-0"] = "[rank 0] hello"
    return fake


@pytest.mark.parametrize("chosen", [["-l", "team=nlp"], [name(number) for number in range(COUNT)]])
@pytest.mark.parametrize("command", [["wait", "--timeout", "1s"], ["status"]])
def test_few_requests_tell_of_many_jobs(many: FakeApiServer, run: Run, command: list[str], chosen: list[str]) -> None:
    code, stdout, stderr = run(*command, *chosen)
    assert len(many.requests) < COUNT / 2
    if command == ["status"]:
        shown = [line.split()[0] for line in stdout.splitlines() if "in namespace team" in line]
        assert (code, shown) == (0, [name(number) for number in range(COUNT)])
    else:
        assert code == ExitCode.TRAINING
        assert stderr.count("error: the wait ended after 1s: job ") == COUNT - 2
        assert stderr.count("hint:") == 2  # the first of each kind of error
        assert "error: job j10 failed" in stderr
        assert "flk: job j20 succeeded" in stderr


def test_status_of_many_jobs_is_data_in_their_order(many: FakeApiServer, run: Run) -> None:
    code, stdout, stderr = run("status", *map(name, range(COUNT - 1, -1, -1)), "nowhere", "-o", "json")
    assert code == ExitCode.NOT_FOUND
    assert stderr.startswith("error: there is no job nowhere in namespace team\n")
    assert [item["name"] for item in json.loads(stdout)["items"]] == [*map(name, range(COUNT - 1, -1, -1))]


@pytest.mark.parametrize("command", ["suspend", "resume", "delete"])
def test_changes_of_many_jobs_name_every_failure_in_order(many: FakeApiServer, run: Run, command: str) -> None:
    many.refused = {f"{JOBS}/{name(number)}": (403, "not yours") for number in (3, 30)}
    if command == "delete":
        many.objects[PODS].clear()  # the jobs are gone at once
    code, stdout, stderr = run(command, "-l", "team=nlp")
    assert code in (ExitCode.ERROR, ExitCode.USAGE)
    refused = [line for line in stderr.splitlines() if "not yours" in line]
    assert [name(number) in line for number, line in zip((3, 30), refused, strict=True)] == [True, True]
    others = [name(number) for number in range(COUNT) if number not in (3, 30)]
    if command == "delete":
        assert stdout.split() == others
    else:
        lines = [line for line in stderr.splitlines() if "job j" in line and "not yours" not in line]
        assert [line.partition("job ")[2].split()[0] for line in lines] == others
        assert stderr.count("has ended") == 2


def test_pods_of_many_suspended_jobs_are_awaited_together(fake: FakeApiServer, run: Run) -> None:
    for number in range(COUNT):
        JobBuilder(1, name=name(number)).all("pod").add_to(fake)
    code, _, stderr = run("suspend", *map(name, range(COUNT)), "--timeout", "0s")
    assert code == ExitCode.TIMEOUT
    late = [line.split()[2] for line in stderr.splitlines() if "pods have not ended yet" in line]
    assert late == [*map(name, range(COUNT))]
    assert stderr.count("hint:") == 1
    assert len([request for request in fake.requests if request.query.get("watch")]) <= 4


def test_an_error_of_the_watch_is_told_once_of_all_jobs(many: FakeApiServer, run: Run, monkeypatch: Any) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise ApiError("the API server is gone")
        yield

    monkeypatch.setattr("flk.observe.follower.list_and_watch", broken)
    code, _, stderr = run("wait", "-l", "team=nlp")
    assert (code, stderr) == (
        ExitCode.ERROR,
        f"error: job {name(0)} and {COUNT - 1} other jobs: the API server is gone\n",
    )


def test_events_are_read_once_for_all_jobs_and_again_when_they_are_old(fake: FakeApiServer, kubeconfig: Any) -> None:
    JobBuilder(1, name="a").event("FailedCreatePod", "no room").add_to(fake)
    lists = ListSource(JobClient(ApiClient(connect())))
    found = [event["reason"] for event in lists.events("PyTorchJob", "team", "a").items]
    assert (found, lists.events("PyTorchJob", "team", "b").items) == (["FailedCreatePod"], [])
    assert len(fake.requests) == 1
    old = ListSource(JobClient(ApiClient(connect())), kept=-1.0)
    assert [len(old.events("PyTorchJob", "team", "a").items) for _ in range(2)] == [1, 1]
    assert len(fake.requests) == 3


def test_what_the_api_server_does_not_give_is_asked_for_once_by_all_jobs(fake: FakeApiServer, kubeconfig: Any) -> None:
    fake.refused[EVENTS] = (400, "no")
    lists = ListSource(JobClient(ApiClient(connect())))
    assert ["no" in lists.events("PyTorchJob", "team", job).error for job in ("a", "b")] == [True, True]
    assert len(fake.requests) == 1
