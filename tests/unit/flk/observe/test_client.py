"""What a JobClient reads of jobs of all kinds, where the server names no kind or the user may not read one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.jobs.listing import list_states
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.observe.client import JobClient
from flk.targets import target_of
from flk_runtime.contract.failure import ExitCode
from tests.support.api_server import BATCH, JOBS, PODS
from tests.support.commands import Run
from tests.support.jobs import JobBuilder


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
    code, stdout, stderr = run("status", *chosen, "-o", "name")
    assert (code, stdout) == (0, "job.batch/gpt\n"), stderr
    assert run("resume", *chosen)[0] == 0
    assert fake.objects[BATCH]["gpt"]["spec"]["suspend"] is False


@pytest.mark.parametrize(
    "words", [["status", "gpt"], ["list"], ["wait", "gpt", "--timeout", "0"], ["delete", "gpt", "--no-wait"]]
)
def test_a_job_is_there_whose_kind_was_installed_a_moment_ago(fake: Any, run: Run, words: list[str]) -> None:
    fake.objects[BATCH] = {}
    del fake.objects[JOBS]
    assert run("list")[0] == 0  # it keeps that there are no PyTorchJobs
    fake.objects[JOBS] = {}
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    code, stdout, stderr = run(*words)
    assert code in (0, ExitCode.RUNNING), stderr
    assert "gpt" in stdout + stderr


def test_a_list_without_jobs_asks_again_which_kinds_there_are(fake: Any, run: Run) -> None:
    assert run("list")[0] == 0
    fake.objects[BATCH] = {"gpt": _batch_job()}
    assert run("list", "-o", "name")[1] == "job.batch/gpt\n"


def test_a_list_of_jobs_takes_three_requests(fake: Any, client: JobClient) -> None:
    fake.objects[BATCH] = {}
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    for _ in range(2):
        fake.requests.clear()
        assert len(list_states(JobClient(ApiClient(connect())))) == 1
    assert sorted(fake.asked("GET")) == [PODS, BATCH, JOBS]


def test_who_may_not_read_pytorchjobs_is_told_that_there_may_be_one(fake: Any, client: JobClient) -> None:
    fake.objects[BATCH] = {}
    with pytest.raises(JobNotFoundError):
        client.get_job("gpt")
    fake.refused[f"{JOBS}/gpt"] = (403, 'pytorchjobs "gpt" is forbidden: User "eve" cannot get resource "pytorchjobs"')
    with pytest.raises(JobNotFoundError, match=r"job gpt .* that you may read: no permission to get pytorchjobs"):
        client.get_job("gpt")
