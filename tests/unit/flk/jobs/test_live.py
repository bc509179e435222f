"""What a live view of a job reads: news of the state as events, telemetry, an API server that does not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flk.errors import ApiError, FlkError, UnreachableError
from flk.jobs import live as module
from flk.jobs.live import LiveJob
from flk.jobs.state import State
from flk.observe.client import JobClient
from flk_runtime.contract.telemetry import Telemetry
from tests.support.api_server import FakeApiServer
from tests.support.jobs import NOW, JobBuilder
from tests.support.processes import until


@pytest.fixture
def live(fake: FakeApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LiveJob]:
    monkeypatch.setattr(module, "EVERY", 0.01)
    monkeypatch.setattr(module, "EVERY_LOG", 0.02)
    monkeypatch.setattr(module, "SHARE", 0)

    def make(read: module.Read = lambda client, name: (Telemetry(NOW), "not measured")) -> LiveJob:
        builder = JobBuilder(2).all("pod")
        builder.add_to(fake)
        return LiveJob(JobClient.connect(), "gpt", builder.state(), read)

    return make


def test_it_reads_the_telemetry(live: Callable[..., LiveJob]) -> None:
    job = live(lambda client, name: (Telemetry(NOW, 1, 100), ""))
    job.start()
    try:
        until(lambda: job.telemetry, "it was read", seconds=20)
    finally:
        job.close()
    assert job.telemetry == Telemetry(NOW, 1, 100)
    assert (job.outage, job.error, job.missing) == ("", None, "")


def test_an_outage_is_a_line_and_keeps_what_was_seen(live: Callable[..., LiveJob]) -> None:
    def refuse(*_: object) -> tuple[Telemetry, str]:
        raise UnreachableError("connection refused")

    job = live(refuse)
    job.start()
    try:
        told = until(lambda: job.missing and job.outage, "the outage is seen", seconds=20)
    finally:
        job.close()
    assert told.endswith("this is the last one: connection refused")
    assert job.state.name == "gpt"


def test_an_outage_may_end_while_it_is_told(live: Callable[..., LiveJob]) -> None:
    """The threads go on while the line is made."""
    job, seen = live(), iter([(0.0, "connection refused"), None])
    job.__class__ = type("Changing", (LiveJob,), {"_outage": property(lambda _: next(seen))})
    assert job.outage.endswith("this is the last one: connection refused")


@pytest.mark.parametrize("news", [ApiError("the pod is gone"), State])
def test_an_outage_ends_with_any_answer(live: Callable[..., LiveJob], news: ApiError | type[State]) -> None:
    errors: list[FlkError] = [UnreachableError("connection refused")]

    def refuse(*_: object) -> tuple[Telemetry, str]:
        raise errors[-1]

    job = live(refuse)
    for _ in range(2):
        job._closed = OneRound()  # type: ignore[assignment]
        job._measure()
        assert job.outage
    if isinstance(news, ApiError):
        errors.append(news)
        job._closed = OneRound()  # type: ignore[assignment]
        job._measure()
    else:
        job.note_state(job.state)
    assert job.outage == ""


class OneRound:
    """An event that is set after one wait, whose seconds it notes."""

    seconds: float | None = None

    def is_set(self) -> bool:
        return self.seconds is not None

    def wait(self, seconds: float) -> None:
        self.seconds = seconds


@pytest.mark.parametrize(("missing", "seconds"), [("", 0.01), ("no launcher answers", 0.02)])
def test_a_log_is_read_less_often_than_a_launcher_is_asked(
    live: Callable[..., LiveJob], missing: str, seconds: float
) -> None:
    job = live(lambda client, name: (Telemetry(NOW), missing))
    closed = OneRound()
    job._closed = closed  # type: ignore[assignment]
    job._measure()
    assert closed.seconds == seconds
