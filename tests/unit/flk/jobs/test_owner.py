"""Whose a job is: the cluster's user's who submitted it; deleted is only what is also from this machine."""

from __future__ import annotations

import getpass
import socket

import pytest

from flk import __main__ as program
from flk import labels
from flk.jobs.listing import current_owner
from tests.support.api_server import JOBS, FakeApiServer
from tests.support.jobs import JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", fail)
    assert current_owner().startswith("unknown@")


@pytest.fixture
def jobs(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> FakeApiServer:
    """Jobs of several users of the cluster, whom their machines call jovyan; flk runs as the first."""
    monkeypatch.setattr(getpass, "getuser", lambda: "jovyan")
    monkeypatch.setattr(socket, "gethostname", lambda: "ada-lab")
    fake.user = "ada"
    for name, user, owner in (
        ("mine", "ada", "jovyan@ada-lab"),
        ("of-laptop", "ada", "ada@laptop"),
        ("of-bob", "bob", "jovyan@ada-lab"),  # who may choose the name of his machine
        ("untold", "", "jovyan@ada-lab"),
    ):
        builder = JobBuilder(1, name=name)
        builder.job["metadata"]["labels"] = {labels.JOB: name}
        builder.job["metadata"]["annotations"] = {labels.OWNER: owner, **({labels.USER: user} if user else {})}
        builder.all("pod").add_to(fake)
    return fake


def test_only_what_is_surely_mine_is_deleted(jobs: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["delete", "--mine", "--no-wait"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "mine\n"
    assert jobs.asked("DELETE") == [f"{JOBS}/mine"]
    assert "left alone, since another person may be ada there: of-laptop; delete" in printed.err


def test_mine_are_listed_from_every_machine(jobs: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["list", "--mine", "-o", "name"]) == 0
    assert [line.rpartition("/")[2] for line in capsys.readouterr().out.split()] == ["mine", "of-laptop"]


@pytest.mark.parametrize("user", ["", "system:anonymous"])
@pytest.mark.parametrize("words", [["delete", "--mine"], ["list", "--mine"]])
def test_without_a_name_in_the_cluster_nothing_is_mine(
    jobs: FakeApiServer, user: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs.user = user
    assert program.main(words) == 1
    assert "error: --mine: the API server does not say who you are" in capsys.readouterr().err
    assert jobs.asked("DELETE") == []


@pytest.mark.parametrize("user", ["", "ada@example.com"])
def test_a_submission_records_the_user(fake: FakeApiServer, user: str, capsys: pytest.CaptureFixture[str]) -> None:
    fake.user = user
    assert program.main(["submit", "-m", "flk_plan.bench", "--no-ship", "--name", "gpt"]) == 0
    assert fake.objects[JOBS]["gpt"]["metadata"]["annotations"].get(labels.USER, "") == user
