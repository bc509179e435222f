"""Reading what a report shows: from a cluster, and after the deletion of the job from what was archived."""

from __future__ import annotations

from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.jobs.answer import keep, look
from flk.observe.client import JobClient
from flk.report.collect import collect
from tests.support.reports import job


@pytest.fixture
def client(kubeconfig: object) -> JobClient:
    return JobClient.connect("fake")


def add(fake: Any) -> None:
    made = job(2, 1)
    made.container["env"].append({"name": "HF_TOKEN", "value": "canary-7f3b"})
    made.add_to(fake)
    lines = [f'[rank 0] {{"step": {step}, "loss": 2.5}}' for step in range(1, 4)]
    lines += ["[rank 0] logged in with canary-7f3b", "[rank 0] Traceback (most recent call last):",
              '[rank 0]   File "train.py", line 3', "[rank 0] ValueError: no ünïcode"]  # fmt: skip
    fake.written["gpt-worker-0"] = "".join(f"{line}\n" for line in lines)


def test_a_job_in_the_cluster(fake: Any, client: JobClient) -> None:
    add(fake)
    report = collect(client, "gpt")
    assert report.telemetry
    assert [each.step for each in report.telemetry.history] == [1, 2, 3]
    assert [each.title for each in report.excerpts] == [
        "Around the first error", "The last lines of pod gpt-worker-0"
    ]  # fmt: skip
    assert "[rank 0] logged in with ***" in report.excerpts[1].lines
    assert "[rank 0] ValueError: no ünïcode" in report.excerpts[0].lines


def test_the_diff_of_a_submission_from_here(fake: Any, client: JobClient) -> None:
    add(fake)
    keep(client, look(client, "gpt"), diff="-a\n+b\n")
    report = collect(client, "gpt")
    assert report.submitted.options["resources.gpu"] == "8"
    assert report.submitted.commit.endswith("-dirty")
    assert report.submitted.diff == "-a\n+b\n"


def test_a_deleted_job_without_a_record_in_the_cluster(fake: Any, client: JobClient) -> None:
    add(fake)
    collect(client, "gpt")
    fake.delete_all()
    with pytest.raises(JobNotFoundError, match="its launchers have kept no record in the cluster"):
        collect(client, "gpt")


def test_a_job_that_never_was(fake: Any, client: JobClient) -> None:
    with pytest.raises(JobNotFoundError):
        collect(client, "gpt")
