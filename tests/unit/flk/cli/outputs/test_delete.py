"""`flk delete` of jobs that exist, and of some that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from flk.jobs.lifecycle.deletion import delete_jobs
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.observe.client import JobClient, JobRef
from tests.support.api_server import JOBS, PODS, FakeApiServer, failure
from tests.unit.flk.cli.outputs import jobs
from tests.unit.flk.cli.outputs.conftest import Terminal

LINES = [
    "flk delete gpt",
    "flk delete gpt --no-wait",
    "flk delete gpt gpt nope resnet",
    "flk delete gpt nope --dry-run",
]


@pytest.mark.parametrize("line", LINES)
def test_delete(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, line: str) -> None:
    jobs.succeeded("gpt").add_to(fake)
    jobs.succeeded("resnet").add_to(fake)
    fake.objects[PODS].clear()  # as if the garbage collector had been there
    assert terminal(line) == snapshot
    assert bool(fake.asked("DELETE")) is ("--dry-run" not in line)


SELECTIONS = ["--all", "--finished", "-l team=nlp", "--finished --older-than 1h", "--finished --older-than 3h"]


@pytest.mark.parametrize("options", [*SELECTIONS, "--all --dry-run", "-l team=none"])
def test_selection(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    jobs.succeeded("old").add_to(fake)
    labelled = jobs.running("busy")
    labelled.job["metadata"]["labels"]["team"] = "nlp"
    labelled.add_to(fake)
    leaving = jobs.succeeded("leaving")
    leaving.job["metadata"]["deletionTimestamp"] = "2026-01-01T02:05:00Z"
    leaving.add_to(fake)
    for pod in fake.objects[PODS].values():
        pod["metadata"]["ownerReferences"] = []
    assert terminal(f"flk delete {options}") == snapshot


def test_a_job_that_has_taken_the_name_meanwhile_is_left_alone(fake: FakeApiServer, kubeconfig: Path) -> None:
    jobs.succeeded("gpt").add_to(fake)
    client = JobClient(ApiClient(connect()))
    older = JobRef("gpt", uid="an-older-uid")
    assert list(delete_jobs(client, [older], wait=False, timeout=None, report=print)) == [(older, False)]
    assert fake.asked("DELETE") == []


def test_jobs_of_others_are_deleted_only_by_their_names(terminal: Terminal, fake: FakeApiServer) -> None:
    jobs.succeeded("own").add_to(fake)
    foreign = jobs.succeeded("foreign")
    foreign.job["metadata"]["labels"] = {}
    foreign.add_to(fake)
    assert "foreign" not in terminal("flk delete --all --dry-run")
    assert "\nforeign\n" in terminal("flk delete foreign --dry-run")


def test_pods_that_stay(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    assert terminal("flk delete gpt --timeout 1s") == snapshot


def test_a_finalizer_that_stays(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    fake.add("pytorchjobs", jobs.running("gpt").job)
    fake.objects[JOBS]["gpt"]["metadata"]["finalizers"] = ["acme.example/keep", "foregroundDeletion"]
    assert terminal("flk delete gpt --timeout 1s") + "\n" + terminal("flk status gpt") == snapshot


def test_no_permission(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion) -> None:
    jobs.add(fake, "running")
    fake.faults += [None, None]  # it reads the job twice
    said = 'pytorchjobs.kubeflow.org "gpt" is forbidden: User "ada" cannot delete resource "pytorchjobs"'
    fake.fail(403, failure(403, said))
    assert terminal("flk delete gpt") == snapshot


@pytest.mark.parametrize(
    "options",
    [
        "gpt --timeout soon",
        "gpt -n A",
        "gpt --context nowhere",
        "",
        "''",
        "gpt --all",
        "gpt --older-than 1h",
        "--older-than 1h",
        "--finished --older-than x",
        "--finished --older-than 7",
        "-l ''",
    ],
)
def test_wrong_option(terminal: Terminal, fake: FakeApiServer, snapshot: SnapshotAssertion, options: str) -> None:
    assert terminal(f"flk delete {options}") == snapshot
    assert fake.requests == []
