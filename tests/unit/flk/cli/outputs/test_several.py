"""Commands on several jobs: by their names, and by their labels."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from flk.cli.several import worst
from tests.support.api_server import PODS, FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.fixture
def three(fake: FakeApiServer) -> None:
    """A job that has failed, one that has succeeded and one that runs. The first two have a label."""
    failed, done = jobs.failed(jobs.RAISED), jobs.succeeded("bert")
    for job in (failed, done):
        job.job["metadata"]["labels"]["team"] = "nlp"
    for builder in (failed.add_to(fake), done.add_to(fake), jobs.running("resnet").add_to(fake)):
        for index, pod in builder.pods.items():
            fake.written[pod["metadata"]["name"]] = jobs.log_of(index)


@pytest.mark.parametrize(
    "line",
    [
        "flk status bert resnet",
        "flk status bert nowhere resnet",
        "flk logs resnet bert --no-follow --tail 1",
        "flk logs bert resnet --no-follow --tail 1 --rank 0 -o json",
        "flk suspend resnet gpt nowhere --timeout 10s",
        "flk suspend resnet gpt --no-wait",
        "flk resume resnet gpt",
        "flk restart nowhere elsewhere",
    ],
)
def test_several(terminal: Terminal, fake: FakeApiServer, three: None, snapshot: SnapshotAssertion, line: str) -> None:
    if "--timeout 10s" in line:
        for pod in [name for name in fake.objects[PODS] if "resnet" in name]:
            del fake.objects[PODS][pod]
    assert terminal(line) == snapshot


@pytest.mark.promise("Causes: flk status, list and wait agree")
def test_wait_ends_with_the_worst_code_after_all_jobs(terminal: Terminal, three: None) -> None:
    shown = terminal("flk wait -l team=nlp")
    assert "flk: job bert succeeded after 50s\n" in shown
    assert "  ValueError: expected 512 features, got 511\nerror: job gpt failed after" in shown
    assert shown.endswith("--- exit code 100")


def test_logs_are_followed_to_the_end_of_all_jobs(terminal: Terminal, three: None) -> None:
    shown = terminal("flk logs gpt bert")
    for job in ("gpt", "bert"):
        assert all(f"{job} [rank {rank}] step 20 loss 2.07\n" in shown for rank in range(3))
    assert "error: job gpt failed" in shown
    assert shown.endswith("--- exit code 100")


@pytest.mark.parametrize("command", ["status", "logs", "wait", "suspend", "resume", "restart"])
def test_which_jobs(
    terminal: Terminal, fake: FakeApiServer, three: None, snapshot: SnapshotAssertion, command: str
) -> None:
    lines = ["", " gpt -l team=nlp", " -l ''", " gpt B", " -l team=vision"]
    shown = [terminal(f"flk {command}{words}") for words in lines]
    assert shown == snapshot
    assert {request.method for request in fake.requests} == {"GET"}


def test_a_selector_changes_only_jobs_of_flk(terminal: Terminal, fake: FakeApiServer) -> None:
    foreign = jobs.running("foreign")
    foreign.job["metadata"]["labels"] = {"team": "nlp"}
    foreign.add_to(fake)
    assert "there is no job that flk has made with the labels team=nlp" in terminal("flk suspend -l team=nlp")
    assert "foreign   Running" in terminal("flk status -l team=nlp")


@pytest.mark.parametrize(
    ("codes", "expected"), [([], 0), ([0, 101], 101), ([101, 104, 0], 104), ([104, 100], 100), ([100, 1], 1), ([7], 7)]
)
def test_the_worst_code(codes: list[int], expected: int) -> None:
    assert worst(codes) == expected
