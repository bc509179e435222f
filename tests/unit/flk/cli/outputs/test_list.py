"""`flk list` of no job, of some, and in every format."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import BATCH, JOBS, FakeApiServer
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal


@pytest.mark.parametrize("options", ["", " -A", " -o json", " -o name"])
def test_no_jobs(terminal: Terminal, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk list{options}") == snapshot


@pytest.mark.parametrize("options", ["", " -A", " -o name", " -A -o name", " -o wide"])
def test_jobs(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    jobs.failed(jobs.RAISED).add_to(fake)
    jobs.running("resnet").add_to(fake)
    jobs.succeeded("bert").add_to(fake)
    jobs.created("llama").add_to(fake)
    assert terminal(f"flk list{options}") == snapshot


def test_json(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.created("llama").add_to(fake)
    assert terminal("flk list -o json") == snapshot


@pytest.mark.parametrize("options", ["--output xml", "--namespace A", "-A -n team", "--context nowhere"])
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk list {options}") == snapshot
    assert fake.requests == []


def test_no_jobs_is_not_said_of_jobs_that_may_not_be_listed(terminal: Terminal, fake: FakeApiServer) -> None:
    said = 'pytorchjobs.kubeflow.org is forbidden: User "ada" cannot list resource "pytorchjobs"'
    fake.objects[BATCH] = {}
    fake.refused[JOBS] = (403, said)
    shown = terminal("flk list")
    assert "error: no permission to list pytorchjobs.kubeflow.org in namespace team (as ada)" in shown
    assert "there are no jobs" not in shown
