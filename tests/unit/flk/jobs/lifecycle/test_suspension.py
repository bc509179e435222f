"""Suspending, resuming and restarting jobs against a fake API server: what is requested, and what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flk.spec.labels import INCOMPLETE, QUEUE, STARTED
from tests.support.api_server import BATCH, JOBS, MAPS, PODS, SECRETS
from tests.support.commands import Run
from tests.support.jobs import MADE, JobBuilder

OLD_SECRET = {"name": "gpt-rendezvous", "key": "secret", "optional": True}


def is_suspended(fake: Any) -> bool:
    return bool(fake.objects[JOBS]["gpt"]["spec"]["runPolicy"].get("suspend"))


def test_suspend_and_resume(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    code, _, stderr = run("suspend", "gpt")
    assert (code, is_suspended(fake)) == (0, True)
    assert "job gpt is suspended; this starts it again: flk resume gpt -n team" in stderr
    code, _, stderr = run("suspend", "gpt")
    assert (code, is_suspended(fake)) == (0, True)
    assert "is suspended already" in stderr
    assert run("resume", "gpt")[0] == 0
    assert not is_suspended(fake)
    code, _, stderr = run("resume", "gpt")
    assert (code, is_suspended(fake)) == (0, False)
    assert "was not suspended" in stderr


def test_the_pods_of_a_job_that_read_it_are_told_when_it_was_resumed(fake: Any, run: Run) -> None:
    foreign, own = JobBuilder(name="foreign"), JobBuilder(name="own")
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{STARTED}']"}}
    own.container["env"] = [{"name": "FLK_STARTED", "valueFrom": field}]
    for builder in (foreign, own):
        builder.job["spec"]["runPolicy"]["suspend"] = True
        builder.add_to(fake)
        assert run("resume", builder.name)[0] == 0
    template = fake.objects[JOBS]["own"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    assert abs(float(template["metadata"]["annotations"][STARTED]) - time.time()) < 100
    assert template["spec"]["containers"][0]["env"], "nothing else is changed"
    assert "metadata" not in fake.objects[JOBS]["foreign"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]


def test_suspend_waits_for_the_pods(fake: Any, run: Run) -> None:
    JobBuilder().all("pod").add_to(fake)
    code, _, stderr = run("suspend", "gpt", "--timeout", "1s")
    assert code == 124
    assert "job gpt is suspended, and its pods have not ended yet: 3 pods left" in stderr
    assert run("suspend", "gpt", "--no-wait")[0] == 0


@pytest.fixture
def batch_job(fake: Any) -> dict[str, Any]:
    """A Job of which one pod has ended."""
    fake.objects[BATCH] = {}
    spec = {"suspend": False, "template": {"spec": {}}}
    job = fake.add("jobs", {"kind": "Job", "metadata": {"name": "gpt", "labels": {"flk.dev/job": "gpt"}}, "spec": spec})
    owned = {"labels": {"flk.dev/job": "gpt"}, "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}]}
    fake.add("pods", {"metadata": {"name": "gpt-0-abcde", **owned}, "spec": {}, "status": {"phase": "Failed"}})
    return dict(job)


def test_suspend_waits_for_no_pod_that_has_ended_and_that_the_controller_keeps(
    fake: Any, run: Run, batch_job: dict[str, Any]
) -> None:
    code, _, stderr = run("suspend", "gpt", "--timeout", "10s")
    assert code == 0, stderr
    assert fake.objects[BATCH]["gpt"]["spec"]["suspend"] is True
    fake.objects[PODS]["gpt-0-abcde"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert run("suspend", "gpt", "--timeout", "1s")[0] == 124, "it is being deleted"
    del fake.objects[BATCH]["gpt"]
    JobBuilder(replicas=2).ended(0, 0).ended(1, 137).add_to(fake)
    assert run("suspend", "gpt", "--timeout", "1s")[0] == 124, "the training operator deletes them"


def test_a_job_that_ends_before_it_notices_that_it_is_suspended_has_ended(
    fake: Any, run: Run, batch_job: dict[str, Any]
) -> None:
    do = fake._do

    def end_it(request: Any) -> Any:
        answer = do(request)
        if request.method == "PATCH":
            conditions = [{"type": "Failed", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
            fake.objects[BATCH]["gpt"]["status"] = {"conditions": conditions}
        return answer

    fake._do = end_it
    code, _, stderr = run("suspend", "gpt", "--timeout", "10s")
    assert (code, "job gpt has ended (Failed)" in stderr) == (2, True), stderr


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_job_that_has_ended_is_neither_suspended_nor_resumed(fake: Any, run: Run, command: str) -> None:
    JobBuilder().condition("Failed").add_to(fake)
    code, _, stderr = run(command, "gpt")
    assert code == 2
    assert "job gpt has ended (Failed)" in stderr
    assert "flk restart gpt -n team" in stderr
    assert fake.asked("PATCH") == []


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"labels": {QUEUE: "gold"}}, "job gpt is in queue gold"),
        ({"deletionTimestamp": MADE}, "job gpt is being deleted"),
    ],
)
@pytest.mark.parametrize("command", ["suspend", "resume", "restart"])
def test_job_in_a_queue_or_one_that_is_being_deleted_is_left_alone(
    fake: Any, run: Run, command: str, metadata: dict[str, Any], said: str
) -> None:
    builder = JobBuilder()
    builder.job["metadata"] |= metadata
    builder.add_to(fake)
    code, _, stderr = run(command, "gpt")
    assert code == 2
    assert said in stderr
    assert fake.asked("PATCH") == []


def test_job_whose_objects_are_missing_is_not_resumed(fake: Any, run: Run) -> None:
    builder = JobBuilder()
    builder.job["metadata"]["annotations"] = {INCOMPLETE: "true"}
    builder.job["spec"]["runPolicy"]["suspend"] = True
    builder.add_to(fake)
    code, _, stderr = run("resume", "gpt")
    assert code == 2
    assert "its submission was interrupted" in stderr
    assert "flk delete gpt" in stderr
    assert is_suspended(fake)


def test_restart_of_a_job_that_runs_suspends_and_resumes_it(fake: Any, run: Run) -> None:
    JobBuilder().add_to(fake)
    assert run("restart", "gpt")[0] == 0
    patches = [request.body["spec"]["runPolicy"] for request in fake.requests if request.method == "PATCH"]
    assert patches == [{"suspend": True}, {"suspend": False}]
    assert fake.asked("DELETE") == []


def test_restart_that_does_not_get_rid_of_the_pods_says_how_to_go_on(fake: Any, run: Run) -> None:
    JobBuilder().all("pod").add_to(fake)
    code, _, stderr = run("restart", "gpt", "--timeout", "1s")
    assert code == 124
    assert "this starts it again: flk resume gpt -n team" in stderr


def add_ended(fake: Any) -> Any:
    builder = JobBuilder().condition("Failed")
    builder.job["metadata"]["annotations"] = {"flk.dev/submission": "first", "flk.dev/owner": "ada@lab"}
    template = builder.job["spec"]["pytorchReplicaSpecs"]["Worker"].setdefault("template", {})
    sources = [{"configMap": {"name": name}} for name in ("gpt-code-0", "another")]
    volume = {"name": "ship", "projected": {"sources": sources}}
    template.setdefault("spec", {}).setdefault("volumes", []).append(volume)
    builder.add_to(fake)
    owner = {"uid": builder.job["metadata"]["uid"]}
    labels = {"flk.dev/job": "gpt"}
    code = {
        "metadata": {"name": "gpt-code-0", "labels": labels, "ownerReferences": [owner]},
        "binaryData": {"a": "eA=="},
    }
    fake.add("configmaps", code)
    fake.created = lambda item: fake.objects[MAPS].pop("gpt-code-0") if item["metadata"]["name"] == "gpt" else None
    fake.add("configmaps", {"metadata": {"name": "another", "labels": labels}})
    return fake.objects[JOBS]["gpt"]


def test_restart_of_a_job_that_has_ended_creates_it_again(fake: Any, run: Run, tmp_path: Path) -> None:
    add_ended(fake)
    before = fake.objects[JOBS]["gpt"]
    template = before["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    template["containers"] = [{"env": [{"name": "FLK_ON_RESTART", "value": "--resume"}]}, {"env": [{"name": "OTHER"}]}]
    code, _, stderr = run("restart", "gpt")
    assert code == 0, stderr
    after = fake.objects[JOBS]["gpt"]
    containers = after["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert [[each["name"] for each in container["env"]] for container in containers] == [
        ["FLK_ON_RESTART", "FLK_RESTARTED"],
        ["OTHER"],
    ]
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["metadata"]["annotations"]["flk.dev/owner"] == "ada@lab"
    assert after["metadata"]["annotations"]["flk.dev/submission"] != "first"
    assert "status" not in after
    assert not is_suspended(fake)
    assert fake.objects[MAPS]["gpt-code-0"]["binaryData"] == {"a": "eA=="}
    assert fake.objects[MAPS]["gpt-code-0"]["metadata"]["ownerReferences"][0]["uid"] == after["metadata"]["uid"]
    assert not list(Path(tmp_path).rglob("restarts/*.json"))


def test_a_job_that_is_created_again_has_a_secret_of_its_own_though_the_one_before_is_still_there(
    fake: Any, run: Run
) -> None:
    """As that of an earlier flk or of a Helm release, which does not go with the job."""
    job = add_ended(fake)
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    template["containers"] = [{"env": [{"name": "FLK_RDZV_SECRET", "valueFrom": {"secretKeyRef": dict(OLD_SECRET)}}]}]
    fake.add("secrets", {"metadata": {"name": "gpt-rendezvous"}, "data": {"secret": "eA=="}})
    code, _, stderr = run("restart", "gpt")
    assert code == 0, stderr
    template = fake.objects[JOBS]["gpt"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    (variable,) = template["spec"]["containers"][0]["env"]
    (name,) = fake.objects[SECRETS].keys() - {"gpt-rendezvous"}
    submission = fake.objects[JOBS]["gpt"]["metadata"]["annotations"]["flk.dev/submission"]
    assert name == f"gpt-rendezvous-{submission[:8]}"
    assert variable["valueFrom"]["secretKeyRef"] == OLD_SECRET | {"name": name, "optional": False}


@pytest.mark.promise("Clusters: flk suspend, resume, restart and delete lose no progress unasked")
def test_a_job_that_would_be_refused_is_not_deleted(fake: Any, run: Run, tmp_path: Path) -> None:
    add_ended(fake)
    do = fake._do
    fake._do = lambda request: (422, fake.status(422, "no GPUs here")) if request.query.get("dryRun") else do(request)
    code, _, stderr = run("restart", "gpt")
    assert (code, "no GPUs here" in stderr) == (1, True)
    assert fake.asked("DELETE") == []
    assert not list(Path(tmp_path).rglob("restarts/*.json"))
    full = fake.status(403, "exceeded quota: jobs")  # by the job itself
    fake._do = lambda request: (403, full) if request.query.get("dryRun") and fake.objects[JOBS] else do(request)
    assert run("restart", "gpt")[0] == 0


def test_a_job_that_somebody_has_created_again_is_left_alone(fake: Any, run: Run) -> None:
    add_ended(fake)
    another: dict[str, Any] = {}
    do = fake._do

    def replace_it(request: Any) -> Any:
        if request.query.get("dryRun") and not another:
            del fake.objects[JOBS]["gpt"]
            another.update(JobBuilder(1).job)
            another["metadata"] |= {"uid": "another"}
            fake.objects[JOBS]["gpt"] = another
        return do(request)

    fake._do = replace_it
    code, _, stderr = run("restart", "gpt")
    assert (code, "its manifests are kept" in stderr) == (1, True)
    assert fake.objects[JOBS]["gpt"] is another


def test_owners_stay(fake: Any, run: Run) -> None:
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "study", "uid": "uid-study"}
    add_ended(fake)["metadata"]["ownerReferences"] = [owner]
    assert run("restart", "gpt")[0] == 0
    assert fake.objects[JOBS]["gpt"]["metadata"]["ownerReferences"] == [owner]


def test_a_job_that_has_ended_in_a_queue_is_submitted_again_by_its_user(fake: Any, run: Run) -> None:
    add_ended(fake)["metadata"]["labels"][QUEUE] = "a"
    code, _, stderr = run("restart", "gpt")
    assert (code, "flk delete gpt -n team, and submit it again" in stderr) == (2, True)
    assert {request.method for request in fake.requests} == {"GET"}


def test_manifests_of_a_job_that_cannot_be_created_again_are_kept(fake: Any, run: Run) -> None:
    pods = add_ended(fake)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    pods["metadata"] = {"annotations": {STARTED: "1000", "mine": "kept"}}
    template = pods["spec"]
    secret = OLD_SECRET | {"name": "gpt-rendezvous-0123abcd", "optional": False}
    template["containers"] = [{"env": [{"name": "FLK_RDZV_SECRET", "valueFrom": {"secretKeyRef": secret}}]}]
    post = f"{JOBS}"
    fake.created = lambda item: None
    original = fake._delete

    def delete(*args: Any) -> None:
        original(*args)
        fake.refused[post] = (403, "exceeded quota: jobs")

    fake._delete = delete
    code, _, stderr = run("restart", "gpt")
    assert code == 1
    assert "exceeded quota: jobs" in stderr
    path = stderr.rpartition(" -f ")[2].split()[0]
    job, code_map = json.loads(Path(path).read_text())["items"]
    assert (job["kind"], code_map["kind"]) == ("PyTorchJob", "ConfigMap")
    (variable,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"]
    assert variable["valueFrom"]["secretKeyRef"] == OLD_SECRET, "nobody creates that of the submission"
    assert "flk.dev/submission" not in job["metadata"]["annotations"]
    kept = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["annotations"]
    assert kept == {"mine": "kept"}, "its deadline counts from when it starts again"
    assert f"this creates it again, without a Secret: kubectl create -f {path} -n team" in stderr


def test_an_interrupted_restart_says_how_to_go_on(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(client: Any, name: str, **how: Any) -> str:
        raise KeyboardInterrupt("the job gpt was deleted again")

    monkeypatch.setattr("flk.jobs.lifecycle.restart", restart)
    code, _, stderr = run("restart", "gpt")
    left = "flk status gpt -n team shows what was being restarted; flk resume gpt -n team starts it"
    assert (code, stderr) == (130, f"flk: interrupted: the job gpt was deleted again; {left}\n")


@pytest.mark.parametrize(
    ("command", "what", "said"),
    [
        (
            "suspend",
            "suspend",
            "flk list -n team shows what is suspended; flk resume gpt -n team starts it again",
        ),
        (
            "delete",
            "deletion.delete_jobs",
            "deletions that have begun go on; flk list -n team shows the jobs that are left",
        ),
    ],
)
def test_an_interrupted_command_says_what_has_begun(
    fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch, command: str, what: str, said: str
) -> None:
    def interrupted(*_: Any, **how: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"flk.jobs.lifecycle.{what}", interrupted)
    code, _, stderr = run(command, "gpt")
    assert (code, stderr) == (130, f"flk: interrupted: {said}\n")
