"""What a JobClient reads of jobs of all kinds, where the server names no kind or the user may not read one."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.kube.discovery import KEPT
from flk.observe.client import JobClient
from flk.spec import labels
from flk.targets import target_of
from flk_runtime.contract import ExitCode
from tests.support.api_server import BATCH, JOBS
from tests.support.commands import Run
from tests.support.jobs import JobBuilder
from tests.unit.flk.cli.outputs import jobs


@pytest.fixture
def batch_job(fake: Any) -> dict[str, Any]:
    """A Job of flk, as it is in the cluster."""
    job = _batch_job()
    fake.objects[BATCH] = {"gpt": job}
    return job


def _batch_job() -> dict[str, Any]:
    job = deepcopy(JobBuilder(replicas=1).job)
    job |= {"apiVersion": "batch/v1", "kind": "Job", "spec": {"suspend": True, "template": {"spec": {}}}, "status": {}}
    job["metadata"]["labels"]["team"] = "nlp"
    return job


@pytest.mark.parametrize("metadata_only", [False, True])
def test_a_listed_job_has_its_kind(batch_job: Any, client: JobClient, metadata_only: bool) -> None:
    (found,) = client.list_jobs(metadata_only=metadata_only)
    assert (found["apiVersion"], found["kind"], target_of(found).name) == ("batch/v1", "Job", "job")
    assert ("spec" in found) is not metadata_only


@pytest.mark.parametrize("chosen", [["-l", "team=nlp"], ["gpt"]])
def test_labels_choose_a_job_of_its_kind(fake: Any, batch_job: Any, run: Run, chosen: list[str]) -> None:
    code, stdout, stderr = run("status", *chosen)
    assert (code, stdout.split()[0]) == (0, "gpt"), stderr
    assert run("resume", *chosen)[0] == 0
    assert fake.objects[BATCH]["gpt"]["spec"]["suspend"] is False


def test_a_job_whose_kind_was_installed_since_is_found_after_a_minute_or_a_list(
    fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.objects[BATCH] = {}
    del fake.objects[JOBS]
    assert run("list")[0] == 0  # it keeps that there are no PyTorchJobs
    fake.objects[JOBS] = {}
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    assert run("status", "gpt")[0] == ExitCode.NOT_FOUND
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr("flk.kube.discovery.time.time", lambda: now + KEPT + 1)
        assert run("status", "gpt")[0] == 0
    assert "gpt" in run("list")[1]
    assert run("status", "gpt")[0] == 0


def test_a_list_without_jobs_asks_again_which_kinds_there_are(fake: Any, run: Run) -> None:
    assert run("list")[0] == 0
    fake.objects[BATCH] = {"gpt": _batch_job()}
    assert run("list", "-o", "name")[1] == "job.batch/gpt\n"


def test_a_list_without_jobs_asks_once_which_kinds_there_are(fake: Any, run: Run) -> None:
    for _ in range(2):  # the second one knows the answer of the first
        fake.requests.clear()
        assert run("list")[0] == 0
        assert fake.asked("GET").count("/apis") == 1


TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"


def test_a_list_with_jobs_has_those_of_a_kind_that_was_installed_a_minute_ago(
    fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.objects[BATCH] = {"batch": named(_batch_job(), "batch")}
    assert run("list")[0] == 0
    job = named(JobBuilder(1).job, "later")
    job["metadata"]["labels"] = {**(job["metadata"].get("labels") or {}), labels.JOB: "later"}
    fake.objects[TRAINJOBS] = {"later": job}
    now = time.time()
    monkeypatch.setattr("flk.kube.discovery.time.time", lambda: now + KEPT + 1)
    printed = run("list", "-o", "name")[1].splitlines()
    assert sorted(line.partition("/")[2] for line in printed) == ["batch", "later"]


def named(job: dict[str, Any], name: str) -> dict[str, Any]:
    job["metadata"] = {**job["metadata"], "name": name, "uid": f"uid-{name}"}
    return job


# By command: the requests that it sends once discovery is cached.
REQUESTS = {
    "list": 3,
    "status gpt": 2,
    "status gpz": 4,
    "why gpt": 2,
    "logs gpt --tail 5 --no-follow": 6,
    "wait gpt": 8,
    "top gpt": 6,
}


@pytest.mark.parametrize("command", REQUESTS)
def test_a_command_sends_no_more_requests_than_this(fake: Any, run: Run, command: str) -> None:
    fake.objects[BATCH] = {}
    jobs.add(fake, "succeeded")
    run("list")
    fake.requests.clear()
    run(*command.split())
    sent = [f"{request.method} {request.path}" for request in fake.requests]
    assert len(sent) <= REQUESTS[command], sent


def test_who_may_not_read_pytorchjobs_is_told_that_there_may_be_one(fake: Any, client: JobClient) -> None:
    fake.objects[BATCH] = {}
    with pytest.raises(JobNotFoundError):
        client.get_job("gpt")
    fake.refused[f"{JOBS}/gpt"] = (403, 'pytorchjobs "gpt" is forbidden: User "eve" cannot get resource "pytorchjobs"')
    with pytest.raises(JobNotFoundError, match=r"job gpt .* that you may read: no permission to get pytorchjobs"):
        client.get_job("gpt")


def test_a_kind_that_a_starting_server_refuses_is_asked_for_again(fake: Any, run: Run, client: JobClient) -> None:
    """A status said otherwise that the job was deleted."""
    fake.objects[BATCH] = {}
    jobs.add(fake, "succeeded")
    run("list")
    fake.fail(403, fake.status(403, 'pytorchjobs "gpt" is forbidden: User "eve" cannot get resource "pytorchjobs"'))
    assert client.get_job("gpt")["kind"] == "PyTorchJob"
