"""What flk says while it waits for the pods of jobs to end."""

from __future__ import annotations

import pytest

from flk.jobs.lifecycle import suspension as ending
from flk.observe.client import JobClient, JobRef
from tests.support.api_server import FakeApiServer
from tests.support.jobs import JobBuilder


@pytest.mark.usefixtures("kubeconfig")
@pytest.mark.parametrize(
    ("pods", "text"), [(True, "waiting for 3 pods of gpt to end"), (False, "waiting for gpt to end")]
)
def test_a_job_without_pods_has_no_number_of_pods(
    fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch, pods: bool, text: str
) -> None:
    builder = JobBuilder()
    (builder.all("pod") if pods else builder).add_to(fake)
    monkeypatch.setattr(ending, "REPORT_EVERY", -1.0)
    told: list[str] = []

    def report(sentence: str) -> None:
        told.append(sentence)
        raise InterruptedError

    jobs = ending.watch_pods_end(
        JobClient.connect(),
        [JobRef("gpt")],
        until=None,
        report=report,
        awaited="end",
        overdue="",
        is_done=lambda *_: False,
    )
    with pytest.raises(InterruptedError):
        list(jobs)
    assert told == [text]
