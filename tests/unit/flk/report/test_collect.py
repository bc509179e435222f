"""Reading what a report shows: from a cluster, and after the deletion of the job from what was archived."""

from __future__ import annotations

from typing import Any

import pytest

from flk.errors import JobNotFoundError
from flk.jobs.archive_writer import remember
from flk.jobs.logs import LogOptions, dump
from flk.observe.client import JobClient
from flk.observe.observation import Observation
from flk.report.collect import collect
from tests.support.api_server import JOBS
from tests.support.jobs import JobBuilder
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


def test_a_deleted_job_has_what_was_archived(fake: Any, client: JobClient) -> None:
    add(fake)
    made = fake.objects[JOBS]["gpt"]
    remember(client, Observation(made, diff="-a\n+b\n"))
    list(dump(client, "gpt", LogOptions()))  # `flk logs` keeps lines
    collect(client, "gpt")
    fake.delete_all()
    notes: list[str] = []
    report = collect(client, "gpt", notes.append)
    assert report.place == "on this machine"
    assert report.submitted.options["resources.gpu"] == "8"
    assert report.submitted.commit.endswith("-dirty")
    assert report.submitted.diff == "-a\n+b\n"
    assert [each.step for each in report.telemetry.history] == [1, 2, 3] if report.telemetry else False
    assert "is gone" in notes[0]


def test_a_job_that_was_deleted_while_it_ran_has_its_last_lines(fake: Any, client: JobClient) -> None:
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    fake.written["gpt-worker-0"] = '[rank 0] {"step": 7, "loss": 2.5}\n'
    list(dump(client, "gpt", LogOptions()))
    fake.delete_all()
    report = collect(client, "gpt")
    assert report.excerpts[-1].lines == ['[rank 0] {"step": 7, "loss": 2.5}']
    assert [each.step for each in report.telemetry.history] == [7] if report.telemetry else False
    assert "logs" not in report.missing


def test_a_job_that_never_was(fake: Any, client: JobClient) -> None:
    with pytest.raises(JobNotFoundError):
        collect(client, "gpt")
