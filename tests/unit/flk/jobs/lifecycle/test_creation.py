"""Creating a job: once, whatever happens to requests and answers, and nothing half-made stays behind."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from flk.errors import ApiError, ConflictError, ForbiddenError, MissingApiError
from flk.jobs.lifecycle.creation import create_job, dry_run, objects_with_uid
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.manifest import Bundle, render
from flk.observe.client import JobClient
from flk.observe.resources import RESOURCES
from flk.spec.job import validated
from flk.spec.labels import INCOMPLETE, OWNER, QUEUE, SHARED, STARTED, SUBMISSION
from flk.targets.rendezvous import environments
from tests.support.api_server import JOBS, MAPS, SECRETS, WORKLOADS
from tests.support.jobs import MADE

CHECKS = 3  # requests before the creation: the API server checks a manifest of each kind, and the right to release


def manifests(submission: str = "mine") -> list[dict[str, Any]]:
    notes = {SUBMISSION: submission, OWNER: "ada@lab"}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "gpt", "annotations": notes},
            "spec": {"runPolicy": {"cleanPodPolicy": "None"}},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-code-0"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-code-1"}},
    ]


@pytest.fixture
def with_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job has a Secret with its UID."""

    def secret(job: dict[str, Any]) -> list[dict[str, Any]]:
        data = {"uid": job["metadata"]["uid"]}
        name = f"{job['metadata']['name']}-rendezvous"
        return [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}]

    monkeypatch.setattr("flk.jobs.lifecycle.creation.objects_with_uid", secret)


def test_everything_belongs_to_the_job(fake: Any, client: JobClient) -> None:
    job = create_job(client, manifests())
    assert fake.asked("POST")[CHECKS - 1 :] == [JOBS, MAPS, MAPS]
    for config in fake.objects[MAPS].values():
        (owner,) = config["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "gpt",
            "uid": job["metadata"]["uid"],
        }


@pytest.mark.usefixtures("with_secret")
def test_job_is_suspended_until_all_of_its_objects_exist(fake: Any, client: JobClient) -> None:
    seen: list[tuple[str, bool]] = []

    def note(created: dict[str, Any]) -> None:
        job = fake.objects[JOBS]["gpt"]
        assert job["metadata"]["annotations"][INCOMPLETE] == "true"
        seen.append((created["metadata"]["name"], job["spec"]["runPolicy"]["suspend"]))

    fake.created = note
    job = create_job(client, manifests())
    assert seen == [("gpt", True), ("gpt-code-0", True), ("gpt-code-1", True), ("gpt-rendezvous", True)]
    assert not job["spec"]["runPolicy"]["suspend"]
    assert INCOMPLETE not in job["metadata"]["annotations"]
    assert fake.requests[-1].method == "PATCH"


def rendered(replicas: int, **fields: Any) -> list[dict[str, Any]]:
    job = validated({"command": "a.py", "name": "gpt", "replicas": replicas, **fields})
    return render(job, Bundle(), submission="89abcdef")


def test_pods_of_a_job_recognise_each_other_by_a_secret_of_its_own(fake: Any, client: JobClient) -> None:
    created = create_job(client, rendered(replicas=2))
    data = fake.objects[SECRETS]["gpt-rendezvous-89abcdef"]["stringData"]
    assert data["uid"] == created["metadata"]["uid"]
    assert len(data["secret"]) >= 43  # 32 random bytes
    assert data["secret"] != objects_with_uid(created)[0]["stringData"]["secret"]
    container = created["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    references = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in container["env"]}
    assert references["FLK_JOB_UID"] == {"name": "gpt-rendezvous-89abcdef", "key": "uid", "optional": False}
    assert references["FLK_RDZV_SECRET"] == {"name": "gpt-rendezvous-89abcdef", "key": "secret", "optional": False}


def test_the_pods_of_a_job_are_told_when_it_was_started(fake: Any, client: JobClient) -> None:
    created = create_job(client, rendered(replicas=1))
    template = created["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert abs(float(template["metadata"]["annotations"][STARTED]) - time.time()) < 100


def test_a_job_of_one_pod_has_no_secret(fake: Any, client: JobClient) -> None:
    created = create_job(client, rendered(replicas=1))
    assert not fake.objects.get(SECRETS)
    (variables,) = environments(created["spec"])
    references = [each["valueFrom"].get("secretKeyRef") for each in variables if "valueFrom" in each]
    # So that the pod does not wait for one.
    assert [reference["optional"] for reference in references if reference] == [True, True]


@pytest.mark.usefixtures("with_secret")
def test_secret_of_a_job_that_was_just_deleted_is_waited_for_without_reading_it(fake: Any, kubeconfig: Any) -> None:
    old = {"name": "gpt-rendezvous", "ownerReferences": [{"uid": "the job before"}]}
    fake.add("secrets", {"metadata": old})
    fake.refused[f"{SECRETS}/gpt-rendezvous"] = (403, "")
    client = JobClient(ApiClient(connect(), sleep=lambda seconds: fake.objects[SECRETS].pop("gpt-rendezvous", None)))
    uid = create_job(client, manifests())["metadata"]["uid"]
    assert fake.objects[SECRETS]["gpt-rendezvous"]["stringData"] == {"uid": uid}


def sharing(name: str, code: str = "eA==") -> list[dict[str, Any]]:
    """The manifests of a job with two archives, of which flk has made the names from the contents."""
    job = manifests(f"of {name}")[0]
    job["metadata"]["name"] = name
    archives = [("flk-runtime-0", "cnVu"), ("flk-code-0", code)]
    return [
        job,
        *(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": archive, "labels": {SHARED: "true"}},
                "binaryData": {"archive": data},
            }
            for archive, data in archives
        ),
    ]


def owners(fake: Any, name: str) -> list[str]:
    return [owner["name"] for owner in fake.objects[MAPS][name]["metadata"]["ownerReferences"]]


def test_jobs_with_the_same_code_share_it(fake: Any, client: JobClient) -> None:
    create_job(client, sharing("one"))
    fake.requests.clear()
    job = create_job(client, sharing("two"))
    assert fake.asked("POST") == [JOBS, JOBS]  # a dry run, and the job: no archive is sent again
    for name in ("flk-runtime-0", "flk-code-0"):
        assert owners(fake, name) == ["one", "two"]
        assert fake.objects[MAPS][name]["metadata"]["ownerReferences"][1]["uid"] == job["metadata"]["uid"]


@pytest.mark.promise("Clusters: Jobs share their code, and the last one takes it along")
@pytest.mark.parametrize("when", ["before it is an owner", "before it is released"])
@pytest.mark.usefixtures("with_secret")
def test_an_archive_that_is_deleted_with_another_job_is_created_again(fake: Any, client: JobClient, when: str) -> None:
    create_job(client, sharing("one"))
    suspended = []

    def collect(headers: Any) -> None:
        """What the garbage collector does at this moment: the next request finds no archive."""
        last = fake.requests[-1]
        is_first_look = last.method == "GET" and last.path == f"{MAPS}/flk-code-0"
        is_last_object = last.method == "POST" and last.path == SECRETS and not last.query
        if is_first_look if when == "before it is an owner" else is_last_object:
            fake.heard = lambda headers: None
            del fake.objects[MAPS]["flk-code-0"]
            suspended.append(fake.objects[JOBS]["two"]["spec"]["runPolicy"]["suspend"])

    fake.heard = collect
    create_job(client, sharing("two"))
    assert suspended == [True]
    assert owners(fake, "flk-code-0") == ["two"]
    assert owners(fake, "flk-runtime-0") == ["one", "two"]
    assert not fake.objects[JOBS]["two"]["spec"]["runPolicy"]["suspend"]


def test_another_object_in_the_place_of_an_archive_is_not_used(fake: Any, client: JobClient) -> None:
    create_job(client, sharing("one", code="ZXZpbA=="))
    with pytest.raises(
        ConflictError, match=r"ConfigMap flk-code-0 .* is not the archive that flk has made.*deleted again"
    ):
        create_job(client, sharing("two"))
    assert "two" not in fake.objects[JOBS]


def test_an_archive_that_two_jobs_create_at_the_same_time_belongs_to_both(fake: Any, client: JobClient) -> None:
    def created(item: dict[str, Any]) -> None:
        if item["metadata"]["name"] == "two":
            fake.created = lambda item: None
            create_job(JobClient(ApiClient(connect())), sharing("one"))

    fake.created = created
    create_job(client, sharing("two"))
    assert set(owners(fake, "flk-code-0")) == {"one", "two"}


def test_the_server_answers_a_dry_run_for_an_archive_that_it_has(fake: Any, client: JobClient) -> None:
    create_job(client, sharing("one"))
    assert [item["kind"] for item in dry_run(client, sharing("two"))] == ["PyTorchJob", "ConfigMap", "ConfigMap"]
    assert owners(fake, "flk-code-0") == ["one"]


def test_a_job_in_a_queue_is_refused_where_there_is_no_kueue(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flk.kube.discovery.KEPT", -1.0)
    queued = rendered(replicas=1, queue="gold")
    fake.refused["/apis"] = (403, "")
    create_job(client, queued)  # whether there is Kueue is not known
    fake.objects[JOBS].clear()
    fake.refused.clear()
    fake.objects["/apis/kueue.x-k8s.io/v1beta9/namespaces/team/workloads"] = fake.objects.pop(WORKLOADS)
    create_job(client, queued)  # flk does not know this version, and Kueue starts the job all the same
    fake.objects.pop("/apis/kueue.x-k8s.io/v1beta9/namespaces/team/workloads")
    fake.objects[JOBS].clear()
    for submit in (create_job, dry_run):
        with pytest.raises(MissingApiError, match="nobody would start a job in queue gold: the cluster") as refused:
            submit(client, queued)
        assert "install Kueue, or leave --queue out" in refused.value.hint
    assert not fake.objects[JOBS]


@pytest.mark.parametrize("by", ["the user", "a webhook"])
def test_job_in_a_queue_is_started_by_the_queue(fake: Any, client: JobClient, by: str) -> None:
    job, *others = manifests()
    if by == "the user":
        job["metadata"]["labels"] = {QUEUE: "gold"}
    else:
        fake.created = lambda item: item["metadata"].setdefault("labels", {QUEUE: "default"})
    create_job(client, [job, *others])
    assert fake.objects[JOBS]["gpt"]["spec"]["runPolicy"]["suspend"]
    assert INCOMPLETE not in fake.objects[JOBS]["gpt"]["metadata"]["annotations"]


def test_another_job_of_the_name_is_not_started(fake: Any, client: JobClient) -> None:
    """As when the job is deleted and created by somebody else before its last object exists."""

    def replaced(created: dict[str, Any]) -> None:
        if created["metadata"]["name"] == "gpt-code-1":
            fake.objects[JOBS]["gpt"] = fake.objects[JOBS]["gpt"] | {
                "metadata": fake.objects[JOBS]["gpt"]["metadata"] | {"uid": "another"}
            }

    fake.created = replaced
    with pytest.raises(ConflictError):
        create_job(client, manifests())
    assert fake.objects[JOBS].get("gpt") is None or fake.objects[JOBS]["gpt"]["spec"]["runPolicy"]["suspend"]


def test_interrupted_submission_deletes_what_it_has_created(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flk.jobs.lifecycle.creation._create_owned", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the job gpt was deleted again"):
        create_job(client, manifests())
    assert fake.objects[JOBS] == {}


@pytest.mark.parametrize("place", ["check_on_server", "_suspended"])
def test_submission_that_is_interrupted_before_it_has_created_anything_says_so(
    fake: Any, client: JobClient, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"flk.jobs.lifecycle.creation.{place}", interrupt)
    with pytest.raises(KeyboardInterrupt, match="nothing was created"):
        create_job(client, manifests())


def test_what_the_server_refuses_is_refused_before_anything_exists(fake: Any, client: JobClient) -> None:
    fake.faults.append(None)
    fake.fail(403, fake.status(403, "exceeded quota: configmaps"))
    with pytest.raises(ApiError) as error:
        create_job(client, manifests())
    assert str(error.value).endswith("exceeded quota: configmaps")
    assert [request.query for request in fake.requests] == [{"dryRun": "All"}] * (CHECKS - 1)
    assert fake.objects[JOBS] == {}


@pytest.mark.promise("Clusters: A request that the API server refuses creates nothing")
@pytest.mark.parametrize("lacking", [f"{JOBS}/gpt", SECRETS])
@pytest.mark.usefixtures("with_secret")
def test_a_right_that_is_needed_later_is_missed_before_anything_exists(
    fake: Any, client: JobClient, lacking: str
) -> None:
    fake.refused[lacking] = (403, 'User "ada" cannot do resource "it"')
    with pytest.raises(ForbiddenError):
        create_job(client, sharing("gpt"))
    assert all(request.query for request in fake.requests if request.method == "POST")


def test_webhook_that_knows_no_dry_run_does_not_prevent_a_job(fake: Any, client: JobClient) -> None:
    refusal = "admission webhook policy.example.com does not support dry run"
    fake.fail(400, fake.status(400, refusal))
    create_job(client, manifests())
    assert list(fake.objects[JOBS]) == ["gpt"]


@pytest.mark.parametrize("request_number", [0, 1, 2, 3])
@pytest.mark.parametrize("status", [0, 500, 503, 504])
@pytest.mark.parametrize("done", [True, False])
def test_lost_answer(fake: Any, client: JobClient, request_number: int, status: int, done: bool) -> None:
    fake.faults.extend([None] * (CHECKS + request_number))
    fake.fail(status, done=done)
    create_job(client, manifests())
    assert list(fake.objects[JOBS]) == ["gpt"]
    assert sorted(fake.objects[MAPS]) == ["gpt-code-0", "gpt-code-1"]
    assert len(fake.asked("POST")) == CHECKS - 1 + (3 if done or request_number == 3 else 4)
    assert not fake.objects[JOBS]["gpt"]["spec"]["runPolicy"]["suspend"]


def test_same_submission_again_is_the_same_job(fake: Any, client: JobClient) -> None:
    assert create_job(client, manifests())["metadata"]["uid"] == create_job(client, manifests())["metadata"]["uid"]
    assert list(fake.objects[JOBS]) == ["gpt"]


TAKEN = {
    "another": ({"annotations": {SUBMISSION: "another", OWNER: "ada@lab"}}, r"already, created \w+ ago by ada@lab"),
    "interrupted": (
        {"annotations": {SUBMISSION: "killed", INCOMPLETE: "true"}},
        "was interrupted: it is suspended and has no pods.*flk delete gpt -n team",
    ),
    "being deleted": ({"deletionTimestamp": MADE}, "is still being deleted"),
    # As after a creation that was undone, when it is tried again.
    "its own, being deleted": (
        {"annotations": {SUBMISSION: "mine"}, "deletionTimestamp": MADE},
        "is still being deleted",
    ),
}


@pytest.mark.parametrize(("metadata", "said"), TAKEN.values(), ids=TAKEN)
def test_a_job_that_has_the_name_is_left_alone(
    fake: Any, client: JobClient, metadata: dict[str, Any], said: str
) -> None:
    fake.add("pytorchjobs", {"metadata": {"name": "gpt", **metadata}})
    with pytest.raises(ConflictError) as error:
        create_job(client, manifests("mine"))
    assert re.search(said, f"{error.value} {error.value.hint}")
    assert fake.asked("DELETE") == []


def test_job_goes_when_its_code_cannot_be_created(fake: Any, client: JobClient) -> None:
    fake.faults.extend([None] * (CHECKS + 1))
    fake.fail(403, fake.status(403, "exceeded quota: configmaps"))
    with pytest.raises(ApiError, match="exceeded quota: configmaps; the job gpt was deleted again"):
        create_job(client, manifests())
    assert fake.objects[JOBS] == {}


def test_job_that_cannot_be_taken_back_is_named(fake: Any, client: JobClient) -> None:
    fake.faults.extend([None] * (CHECKS + 1))
    fake.fail(403, fake.status(403, "exceeded quota: configmaps"))
    fake.fail(403, fake.status(403))
    with pytest.raises(ApiError, match=r"the job gpt still exists because it could not be deleted.*flk delete gpt"):
        create_job(client, manifests())


def test_dry_run_creates_nothing_and_has_everything_checked(fake: Any, client: JobClient) -> None:
    dry_run(client, manifests())
    assert [request.query for request in fake.requests] == [{"dryRun": "All"}] * 3


def names_of_jobs(client: JobClient) -> list[str]:
    return [job["metadata"]["name"] for job in client.api.list_all(client.target(RESOURCES["pytorchjob"]))[0]]


def test_long_lists_come_in_pages(fake: Any, client: JobClient) -> None:
    first = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next", "resourceVersion": "5"}}
    fake.fail(200, first)
    fake.add("pytorchjobs", {"metadata": {"name": "b"}})
    assert names_of_jobs(client) == [
        "a",
        "b",
    ]
    assert fake.requests[-1].query["continue"] == "next"


def test_list_that_expires_between_pages_begins_again(fake: Any, client: JobClient) -> None:
    fake.fail(200, {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next"}})
    fake.fail(410, fake.status(410, "too old"))
    fake.add("pytorchjobs", {"metadata": {"name": "a"}})
    assert names_of_jobs(client) == ["a"]
