"""JobHandle: how a wait ends, the methods that commands have, and what a notebook shows."""

from __future__ import annotations

from typing import Any

import pytest

import flk
from tests.support.api_server import JOBS, FakeApiServer
from tests.unit.flk.cli.outputs import jobs

pytestmark = pytest.mark.usefixtures("kubeconfig")


@pytest.mark.parametrize(
    ("which", "error", "said"),
    [
        ("exception on rank 1", flk.JobFailedError, "job gpt failed after .* raised ValueError"),
        ("image missing", flk.JobStuckError, "job gpt is stuck: "),
        ("being deleted", flk.WaitTimeoutError, "job gpt is terminating"),
    ],
)
def test_a_wait_raises_unless_the_job_has_succeeded(
    fake: FakeApiServer, which: str, error: type[Exception], said: str
) -> None:
    jobs.add(fake, which)
    handle = flk.get("gpt")
    timeout = 0.01 if error is flk.WaitTimeoutError else None
    with pytest.raises(error, match=said):
        handle.wait(timeout)
    if error is not flk.WaitTimeoutError:
        assert handle.wait(check=False).phase in ("Failed", "Stuck")


def test_a_stuck_job_is_not_waited_for_without_time(fake: FakeApiServer) -> None:
    jobs.add(fake, "image missing")
    for check in (True, False):
        with pytest.raises(flk.WaitTimeoutError, match="job gpt is stuck"):
            flk.get("gpt").wait(0, check=check)


def test_a_wait_for_a_job_that_was_deleted(fake: FakeApiServer) -> None:
    jobs.add(fake, "running")
    handle = flk.get("gpt")
    fake.objects[JOBS].clear()
    with pytest.raises(flk.JobDeletedError, match="job gpt is gone: it was deleted"):
        handle.wait()
    assert handle.wait(check=False).was_deleted


def test_a_wait_for_a_job_that_has_succeeded(fake: FakeApiServer, capsys: Any) -> None:
    jobs.add(fake, "succeeded")
    assert flk.get("gpt").wait().phase == "Succeeded"
    assert capsys.readouterr() == ("", "")


def test_a_handle_says_why_its_job_failed(fake: FakeApiServer) -> None:
    jobs.add(fake, "exception on rank 1")
    handle = flk.get("gpt")
    assert repr(handle) == "JobHandle('gpt', namespace='team')"
    report = handle.why()
    assert report.cause
    assert "raised ValueError" in report.summary
