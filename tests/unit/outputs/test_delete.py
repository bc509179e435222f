"""`flk delete` of jobs that exist, and of some that do not."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.support.api_server import FakeApiServer, failure
from tests.unit.outputs import jobs
from tests.unit.outputs.conftest import Terminal


@pytest.mark.parametrize("line", ["flk delete gpt", "flk delete gpt --no-wait", "flk delete gpt gpt nope resnet"])
def test_delete(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    jobs.succeeded("gpt").add_to(fake)
    jobs.succeeded("resnet").add_to(fake)
    fake.objects["/api/v1/namespaces/team/pods"].clear()  # as if the garbage collector had been there
    assert terminal(line) == snapshot


def test_pods_that_stay(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    assert terminal("flk delete gpt --timeout 1s") == snapshot


def test_no_permission(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    fake.faults.append(None)
    said = 'pytorchjobs.kubeflow.org "gpt" is forbidden: User "ada" cannot delete resource "pytorchjobs"'
    fake.fail(403, failure(403, said))
    assert terminal("flk delete gpt") == snapshot


@pytest.mark.parametrize("options", ["--timeout soon", "-n A", "--context nowhere"])
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk delete gpt {options}") == snapshot
    assert fake.requests == []
