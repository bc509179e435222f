"""What a JobClient reads of jobs of all kinds, where the server names no kind or the user may not read one."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.observe.client import JobClient
from flk.targets import target_of
from tests.support.api_server import BATCH, JOBS
from tests.support.commands import Run
from tests.support.jobs import JobBuilder


@pytest.fixture
def batch_job(fake: Any) -> dict[str, Any]:
    """A Job of flk, as it is in the cluster."""
    job = deepcopy(JobBuilder(replicas=1).job)
    job |= {"apiVersion": "batch/v1", "kind": "Job", "spec": {"suspend": True, "template": {"spec": {}}}, "status": {}}
    job["metadata"]["labels"]["team"] = "nlp"
    fake.objects[BATCH] = {"gpt": job}
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


def test_who_may_not_read_pytorchjobs_is_told_that_there_may_be_one(fake: Any, client: JobClient) -> None:
    fake.objects[BATCH] = {}
    with pytest.raises(JobNotFoundError):
        client.get_job("gpt")
    fake.refused[f"{JOBS}/gpt"] = (403, 'pytorchjobs "gpt" is forbidden: User "eve" cannot get resource "pytorchjobs"')
    with pytest.raises(JobNotFoundError, match=r"job gpt .* that you may read: no permission to get pytorchjobs"):
        client.get_job("gpt")
