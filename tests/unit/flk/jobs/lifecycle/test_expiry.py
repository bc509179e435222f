"""The TTL of jobs: where it is in the manifests, and which jobs the next submission deletes."""

from __future__ import annotations

from pathlib import Path

import pytest

import flk
from flk.errors import UsageError
from flk.spec.job import validated
from tests.support.api_server import BATCH, JOBS, FakeApiServer
from tests.support.commands import Run
from tests.support.jobs import JobBuilder

ENDED = "2026-01-01T00:10:00Z"


@pytest.fixture
def submit(run: Run, tmp_path: Path) -> Run:
    """Submits a job of this name; stderr says what was deleted."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    return lambda name, *words: run("submit", "train.py", "--name", name, *words)


def ended(fake: FakeApiServer, name: str, condition: str, ttl: str = "3600") -> None:
    """A job that has this condition since ten minutes past midnight."""
    builder = JobBuilder(name=name).condition(condition)
    builder.job["status"]["conditions"][-1]["lastTransitionTime"] = ENDED
    builder.job["metadata"]["labels"] |= {"flk.dev/ttl": ttl} if ttl else {}
    builder.add_to(fake)


def left(fake: FakeApiServer) -> set[str]:
    return set(fake.objects[JOBS])


def test_jobs_whose_ttl_has_passed_are_deleted_at_the_next_submission_with_one(
    fake: FakeApiServer, submit: Run
) -> None:
    fake.date = "Thu, 01 Jan 2026 01:10:01 GMT"
    for name, condition in {"failed": "Failed", "done": "Succeeded", "runs": "Running"}.items():
        ended(fake, name, condition)
    ended(fake, "recent", "Failed", ttl="3602")
    ended(fake, "kept", "Failed", ttl="")
    ended(fake, "strange", "Failed", ttl="soon")
    every = left(fake)
    assert submit("first")[0] == 0
    assert left(fake) == every | {"first"}
    code, _, said = submit("new", "--ttl", "7d")
    assert code == 0
    assert left(fake) == {"runs", "recent", "kept", "strange", "first", "new"}
    assert "flk: deleted job failed: it has ended, and its TTL has passed\n" in said
    assert said.count("deleted job") == 2
    new = fake.objects[JOBS]["new"]
    assert new["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 7 * 86_400
    assert new["metadata"]["labels"]["flk.dev/ttl"] == str(7 * 86_400)


def test_a_job_that_may_not_be_deleted_disturbs_neither_a_submission_nor_other_deletions(
    fake: FakeApiServer, submit: Run
) -> None:
    ended(fake, "failed", "Failed", ttl="1")
    ended(fake, "late", "Failed", ttl="1")
    fake.refused["/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/failed"] = (403, 'User "ada" cannot delete')
    code, _, said = submit("new", "--ttl", "1d")
    assert code == 0
    assert "deleted job failed" not in said
    assert "deleted job late" in said
    assert left(fake) == {"failed", "new"}


@pytest.mark.parametrize(("ttl", "stays"), [(None, True), (86_400, False)])
def test_a_submission_from_python_deletes_what_one_of_the_command_line_does(
    fake: FakeApiServer, kubeconfig: Path, tmp_path: Path, ttl: int | None, stays: bool
) -> None:
    (tmp_path / "train.py").touch()
    ended(fake, "failed", "Failed", ttl="1")
    flk.submit(flk.Job(command=["train.py"], name="new", ttl=ttl), tmp_path)
    assert left(fake) == {"new"} | ({"failed"} if stays else set())


def test_an_interruption_of_the_deletions_says_that_the_new_job_exists(
    fake: FakeApiServer, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(client: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "train.py").touch()
    monkeypatch.setattr("flk.jobs.submission.delete_expired", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the job new exists and goes on: flk status new"):
        flk.submit(flk.Job(command=["train.py"], name="new", ttl=86_400), tmp_path)
    assert left(fake) == {"new"}


def test_a_job_is_deleted_where_one_of_another_kind_has_its_name(fake: FakeApiServer, submit: Run) -> None:
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
    fake.objects |= {path: {}, BATCH: {}}
    ended(fake, "gpt", "Running")
    meta = {"name": "gpt", "namespace": "team", "uid": "uid-of-the-trainjob", "labels": {"flk.dev/ttl": "1"}}
    failed = {"type": "Failed", "status": "True", "lastTransitionTime": ENDED}
    fake.add("trainjobs", {"metadata": meta, "spec": {}, "status": {"conditions": [failed]}})
    assert "flk: deleted job gpt: " in submit("new", "--ttl", "1d")[2]
    assert (left(fake), fake.asked("DELETE")) == ({"gpt", "new"}, [f"{path}/gpt"])


@pytest.mark.parametrize("ttl", ["0", "-1s", "soon"])
def test_a_ttl_that_is_no_time(ttl: str) -> None:
    with pytest.raises(UsageError, match="ttl"):
        validated({"command": "train.py", "ttl": ttl})
