"""Creating a job: once, whatever happens to requests and answers, and nothing half-made stays behind."""

from __future__ import annotations

from typing import Any

import pytest

from flk.errors import ApiError, ConflictError
from flk.jobs.client import JobClient
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.labels import OWNER, SUBMISSION

JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
MAPS = "/api/v1/namespaces/team/configmaps"


def manifests(submission: str = "mine") -> list[dict[str, Any]]:
    notes = {SUBMISSION: submission, OWNER: "ada@lab"}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "gpt", "annotations": notes},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-code-0"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-code-1"}},
    ]


@pytest.fixture
def client(kubeconfig: Any) -> JobClient:
    return JobClient(ApiClient(connect(), sleep=lambda seconds: None))


def test_everything_belongs_to_the_job(fake: Any, client: JobClient) -> None:
    job = client.create_job(manifests())
    assert fake.asked("POST") == [JOBS, MAPS, MAPS]
    for config in fake.objects[MAPS].values():
        (owner,) = config["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "gpt",
            "uid": job["metadata"]["uid"],
        }


@pytest.mark.parametrize("request_number", [0, 1, 2])
@pytest.mark.parametrize("status", [0, 500, 503, 504])
@pytest.mark.parametrize("done", [True, False])
def test_lost_answer(fake: Any, client: JobClient, request_number: int, status: int, done: bool) -> None:
    fake.faults.extend([None] * request_number)
    fake.fail(status, done=done)
    client.create_job(manifests())
    assert list(fake.objects[JOBS]) == ["gpt"]
    assert sorted(fake.objects[MAPS]) == ["gpt-code-0", "gpt-code-1"]
    assert len(fake.asked("POST")) == (3 if done else 4)


def test_busy_server_has_done_nothing(fake: Any, client: JobClient) -> None:
    fake.fail(429)
    client.create_job(manifests())
    assert fake.asked("GET") == []


def test_same_submission_again_is_the_same_job(fake: Any, client: JobClient) -> None:
    assert client.create_job(manifests())["metadata"]["uid"] == client.create_job(manifests())["metadata"]["uid"]
    assert list(fake.objects[JOBS]) == ["gpt"]


def test_anothers_job_is_refused_with_its_age_and_owner(fake: Any, client: JobClient) -> None:
    client.create_job(manifests("another"))
    with pytest.raises(ConflictError, match=r"job gpt in namespace team already, created \w+ ago by ada@lab"):
        client.create_job(manifests("mine"))
    assert fake.asked("DELETE") == []


def test_lost_answer_to_a_refusal_is_no_success(fake: Any, client: JobClient) -> None:
    client.create_job(manifests("another"))
    fake.fail(0)
    with pytest.raises(ConflictError):
        client.create_job(manifests("mine"))


def test_job_that_is_being_deleted_has_its_name_still(fake: Any, client: JobClient) -> None:
    fake.add("pytorchjobs", {"metadata": {"name": "gpt", "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    with pytest.raises(ConflictError, match="is still being deleted"):
        client.create_job(manifests())


def test_own_job_that_is_being_deleted_is_not_taken_for_the_created_one(fake: Any, client: JobClient) -> None:
    """As after a creation that was undone, when it is tried again."""
    job = manifests()[0]
    fake.add("pytorchjobs", job | {"metadata": job["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    with pytest.raises(ConflictError, match="is still being deleted"):
        client.create_job(manifests())


def test_job_goes_when_its_code_cannot_be_created(fake: Any, client: JobClient) -> None:
    fake.faults.append(None)
    fake.fail(403, fake.status(403, "exceeded quota: configmaps"))
    with pytest.raises(ApiError, match="exceeded quota: configmaps; the job gpt was deleted again"):
        client.create_job(manifests())
    assert fake.objects[JOBS] == {}


def test_job_that_cannot_be_taken_back_is_named(fake: Any, client: JobClient) -> None:
    fake.faults.append(None)
    fake.fail(403, fake.status(403, "exceeded quota: configmaps"))
    fake.fail(403, fake.status(403))
    with pytest.raises(ApiError, match=r"the job gpt still exists because it could not be deleted.*flk delete gpt"):
        client.create_job(manifests())


def test_code_of_a_job_that_was_just_deleted_is_waited_for(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"name": "gpt-code-0", "ownerReferences": [{"uid": "the job before"}]}
    fake.add("configmaps", {"metadata": old})
    monkeypatch.setattr("flk.jobs.client.time.sleep", lambda seconds: fake.objects[MAPS].pop("gpt-code-0"))
    client.create_job(manifests())
    assert fake.objects[MAPS]["gpt-code-0"]["metadata"]["ownerReferences"][0]["uid"] != "the job before"


def test_code_map_of_something_else_is_left_alone(fake: Any, client: JobClient) -> None:
    fake.add("configmaps", {"metadata": {"name": "gpt-code-1"}})
    with pytest.raises(ConflictError, match=r"there is a ConfigMap gpt-code-1.*which is not this job's"):
        client.create_job(manifests())
    assert "gpt-code-1" in fake.objects[MAPS]
    assert fake.objects[JOBS] == {}


def test_dry_run_creates_nothing_and_has_everything_checked(fake: Any, client: JobClient) -> None:
    client.dry_run(manifests())
    assert [request.query for request in fake.requests] == [{"dryRun": "All"}] * 3


def test_long_lists_come_in_pages(fake: Any, client: JobClient) -> None:
    first = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next", "resourceVersion": "5"}}
    fake.fail(200, first)
    fake.add("pytorchjobs", {"metadata": {"name": "b"}})
    assert [job["metadata"]["name"] for job in client.list_jobs()] == ["a", "b"]
    assert fake.requests[-1].query["continue"] == "next"


def test_list_that_expires_between_pages_begins_again(fake: Any, client: JobClient) -> None:
    fake.fail(200, {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next"}})
    fake.fail(410, fake.status(410, "too old"))
    fake.add("pytorchjobs", {"metadata": {"name": "a"}})
    assert [job["metadata"]["name"] for job in client.list_jobs()] == ["a"]
