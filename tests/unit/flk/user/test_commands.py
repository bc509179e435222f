"""Commands that messages suggest reach the same cluster, namespace and user as the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flk.health import find
from flk.jobs.cluster import read_cluster
from flk.kube import ConnectionOptions, set_connection_options
from flk.observe.client import JobClient, JobRef
from flk.observe.view import JobView
from flk.user.commands import Commands, Connection
from flk_runtime.contract.failure import Kind
from tests.support.jobs import JobBuilder, record
from tests.unit.flk.cli.outputs import jobs

PROD = Connection("prod", "my config", "ada")


@pytest.fixture(autouse=True)
def default_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("sys.argv", ["flk"])
    yield
    set_connection_options(ConnectionOptions())


def test_a_job_of_a_queue_runs_again_by_a_new_submission() -> None:
    commands = Commands("team")
    assert commands.again("gpt", "", "--avoid-node a") == "flk restart gpt -n team --avoid-node a"
    assert commands.again("gpt", "") == "flk restart gpt -n team"
    assert commands.again("gpt", "q") == "flk delete gpt -n team and a new submission"
    assert commands.again("gpt", "q", "--avoid-node a").endswith(" and a new submission with --avoid-node a")


@pytest.mark.parametrize(
    ("given", "word"), [("gpt", "gpt"), ("pytorchjob/gpt", "gpt"), ("job.batch/gpt", "job.batch/gpt")]
)
def test_commands_about_a_job_name_its_kind_where_its_name_means_another_one(
    kubeconfig: Any, given: str, word: str
) -> None:
    commands = JobClient.connect().for_job(JobRef.parse(given)).commands
    assert (commands.flk("why", "gpt"), commands.flk("why", "x")) == (f"flk why {word} -n team", "flk why x -n team")


def test_commands_name_the_place() -> None:
    flags = "--context prod --kubeconfig 'my config' --as ada"
    commands = Commands("ml", PROD)
    assert commands.flk("why", "gpt") == f"flk why gpt -n ml {flags}"
    assert commands.flk("list", namespace="other") == f"flk list -n other {flags}"
    assert commands.kubectl("get pods") == f"kubectl get pods -n ml {flags}"
    assert commands.kubectl("get nodes", namespaced=False) == f"kubectl get nodes {flags}"
    assert Commands("ml").flk("list") == "flk list -n ml"


def test_remedies_for_nodes_name_the_context() -> None:
    failure = replace(jobs.RAISED, kind=Kind.GPU)
    broken = JobBuilder()
    broken.record = record(failure)
    silent = JobBuilder().all("pod")
    silent.pod(2, "Unknown", node="node-c")
    remedies = [find(JobView(job.seen(), Commands("team", Connection("prod"))))[0].remedy for job in (broken, silent)]
    assert "kubectl cordon node-b --context prod" in remedies[0]
    assert "kubectl delete node node-c --context prod" in remedies[1]


@pytest.mark.usefixtures("kubeconfig")
@pytest.mark.parametrize(("chosen", "flags"), [(None, ""), ("fake", " --context fake")])
def test_remedies_of_doctor_name_the_context_always_and_others_where_it_is_chosen(
    chosen: str | None, flags: str
) -> None:
    client = JobClient.connect(chosen)
    assert client.commands.kubectl("get pods") == f"kubectl get pods -n team{flags}"
    assert read_cluster(client).commands.kubectl("get pods") == "kubectl get pods -n team --context fake"
