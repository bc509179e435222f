"""A list of many jobs interprets and copies each of them once: the time that it takes grows with that."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from flk.jobs.listing import current_owner, list_observed
from flk.jobs.state import derive
from flk.observe.client import JobClient
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.record import Standstill
from tests.support import recorded
from tests.support.api_server import BATCH, EVENTS, FakeApiServer
from tests.support.commands import Run
from tests.support.jobs import NOW, JobBuilder, record
from tests.unit.flk.observe.test_needs import pending_workload


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often functions were called that take time for each job."""
    found: Counter[str] = Counter()
    before: Callable[..., None] = JobView.__init__

    def call(*arguments: Any) -> None:
        found["__init__"] += 1
        before(*arguments)

    monkeypatch.setattr(JobView, "__init__", call)
    return found


def test_each_job_of_a_list_is_interpreted_once(fake: FakeApiServer, run: Run, counted: Counter[str]) -> None:
    for number in range(5):
        JobBuilder(2, name=f"runs-{number}").all("pod").condition("Running").add_to(fake)
        fake.written[f"runs-{number}-worker-0"] = "[rank 0] hello"
    code, stdout, _ = run("list")
    assert (code, stdout.count("Running")) == (0, 5)
    # Twice more with its record.
    assert counted == {"__init__": 15}
    assert len([path for path in fake.asked("GET") if not path.endswith("/log")]) < 10
    assert len([path for path in fake.asked("GET") if path.endswith("/log")]) == 5


def _queued(name: str) -> JobBuilder:
    builder = JobBuilder(1, name=name)
    builder.job["spec"]["runPolicy"]["suspend"] = True
    builder.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gold"
    return builder


def _with_workload(fake: FakeApiServer, name: str) -> None:
    meta = {"name": f"pytorchjob-{name}", "labels": {"kueue.x-k8s.io/job-uid": f"uid-{name}"}}
    fake.add("workloads", {"metadata": meta, "status": {}})


def _phases(run: Run, *names: str) -> list[tuple[str, str]]:
    """The phase and reason of each job in the list, after a check that they are those of its status."""
    listed = {item["name"]: item for item in json.loads(run("list", "-o", "json")[1])["items"]}
    for name in names:
        state = json.loads(run("status", name, "-o", "json")[1])
        assert (listed[name]["phase"], listed[name]["reason"]) == (state["phase"], state["reason"])
        assert (listed[name]["code"], listed[name]["message"]) == (state["code"], state["message"])
    return [(listed[name]["phase"], listed[name]["reason"]) for name in names]


@pytest.mark.promise("Causes: flk status, list and wait agree")
def test_a_job_with_a_queue_is_stuck_without_kueue_and_queued_with_it(fake: FakeApiServer, run: Run) -> None:
    _queued("gpt").add_to(fake)
    assert _phases(run, "gpt") == [("Stuck", "QueueIgnoresJobs")]
    assert run("wait", "gpt", "--timeout", "60s")[0] == ExitCode.INFRASTRUCTURE
    _with_workload(fake, "gpt")
    assert _phases(run, "gpt") == [("Queued", "WaitingInQueue")]
    del fake.objects["/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"]
    assert _phases(run, "gpt") == [("Stuck", "WaitingInQueue")]


def test_jobs_of_a_list_have_the_workloads_that_are_theirs(fake: FakeApiServer, run: Run) -> None:
    for name in ("evicted", "waits"):
        _queued(name).add_to(fake)
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for a job that is urgent"}
    meta = {"name": "pytorchjob-evicted", "labels": {"kueue.x-k8s.io/job-uid": "uid-evicted"}}
    fake.add("workloads", {"metadata": meta, "status": {"conditions": [evicted]}})
    fake.add("workloads", {"metadata": {"name": "of-nobody"}})
    _with_workload(fake, "waits")
    assert _phases(run, "evicted", "waits") == [("Preempted", "PreemptedByQueue"), ("Queued", "WaitingInQueue")]
    run("list", "-A")
    workloads = [path for path in fake.asked("GET") if path.endswith("/workloads")]
    assert workloads.count("/apis/kueue.x-k8s.io/v1beta1/workloads") == 1


@pytest.mark.parametrize("count", [1, 5])
def test_a_name_means_the_same_one_of_two_kinds_alone_and_among_many(fake: FakeApiServer, run: Run, count: int) -> None:
    for number in range(count):
        JobBuilder(1, name=f"a-{number}").all("pod").condition("Running").add_to(fake)
    another = deepcopy(JobBuilder(1, name="a-0").job)
    another |= {"apiVersion": "batch/v1", "kind": "Job", "spec": {"suspend": True, "template": {"spec": {}}}}
    fake.objects[BATCH] = {"a-0": another}
    _, stdout, _ = run("status", *(f"a-{number}" for number in range(count)), "-o", "json")
    told = json.loads(stdout)
    first = told["items"][0] if "items" in told else told
    assert (first["kind"], first["phase"]) == ("PyTorchJob", "Running")


def test_the_list_names_a_standstill_that_only_the_record_tells(fake: FakeApiServer, run: Run) -> None:
    JobBuilder(1).all("pod").condition("Running").add_to(fake)
    hangs = Standstill(NOW, "rank 0 sleeps", "gpt-worker-0")
    told = replace(record(None, None, outcome="running"), standstill=hangs)
    fake.written["gpt-worker-0"] = f"[pod 0] flk-record {told.to_json()}"
    assert _phases(run, "gpt") == [("Running", "Standstill")]
    assert "Standstill" in run("list")[1]
    assert len([path for path in fake.asked("GET") if path.endswith("/log")]) == 3


@pytest.mark.parametrize("case", sorted(path.stem for path in recorded.FOLDER.glob("*.json")))
def test_the_list_says_of_a_recorded_job_what_its_status_says(
    fake: FakeApiServer, run: Run, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Their logs are missing here: a list reads none. What tells without a log is found as it was recorded."""
    view = recorded.load(recorded.FOLDER / f"{case}.json")
    owner = [{"kind": "PyTorchJob", "name": view.name, "uid": view.uid, "controller": True}]
    around = view.seen
    fake.objects[CLAIMS] = {}
    if around.not_served:
        del fake.objects["/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"]
    for kind, items in (
        ("pytorchjobs", [view.job]),
        ("pods", view.objects.values()),
        ("events", view.events),
        ("persistentvolumeclaims", around.claims.values()),
        ("workloads", around.workloads),
    ):
        for item in items:
            owners = {"ownerReferences": owner} if kind == "pods" else {}
            fake.add(kind, {**item, "metadata": {**item["metadata"], **owners, "namespace": "team"}})
    fake.objects["/api/v1/nodes"] = dict(around.nodes)
    for event in fake.objects[EVENTS].values():
        event["involvedObject"]["namespace"] = "team"
    monkeypatch.setattr("flk.observe.client.JobClient.now", lambda _: view.now)
    found, recorded_state = _phases(run, view.name), derive(view)
    if not around.logs and not around.record:
        assert found == [(recorded_state.phase, recorded_state.reason)]


CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
PENDING = "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/team/localqueues/gold/pendingworkloads"


@pytest.mark.parametrize(("every", "one"), [(200, 200), (403, 200), (403, 403), (403, 400), (400, 400)])
@pytest.mark.usefixtures("kubeconfig")
def test_a_claim_counts_as_missing_only_if_the_claims_were_read(fake: FakeApiServer, every: int, one: int) -> None:
    message = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    pending = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    builder = JobBuilder(1).pod(0, "Pending", {}, node="", conditions=[pending])
    builder.pods[0]["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    builder.add_to(fake)
    fake.objects[CLAIMS] = {}
    for path, status in ((CLAIMS, every), (f"{CLAIMS}/data", one)):
        if status != 200:
            fake.refused[path] = (status, 'User "ada" cannot read resource')
    (listed,) = list_observed(JobClient.connect(namespace="team"))
    assert listed.seen.missing == ({"persistentvolumeclaims/data"} if one == 200 else set())
    assert {need.name for need in listed.seen.unread} == ({"data"} if one == 400 else set())


def test_a_node_that_is_gone_is_asked_for_once(fake: FakeApiServer, run: Run) -> None:
    for name in ("gpt", "bert"):
        JobBuilder(2, name=name).pod(0).pod(1, "Unknown", node="node-x").condition("Running").add_to(fake)
    fake.objects["/api/v1/nodes"] = {}
    assert {reason for _, reason in _phases(run, "gpt", "bert")} == {"NodeLost"}
    fake.requests.clear()
    run("list")
    assert [path for path in fake.asked("GET") if "nodes" in path] == ["/api/v1/nodes/node-x"]


def test_the_list_says_the_place_in_a_queue_which_is_read_once_for_all_of_its_jobs(
    fake: FakeApiServer, run: Run
) -> None:
    for number, name in enumerate(("gpt", "bert")):
        _queued(name).add_to(fake)
        meta = {"name": f"pytorchjob-{name}-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": f"uid-{name}"}}
        fake.add("workloads", {"metadata": meta})
        waiting = fake.documents.setdefault(PENDING, {"kind": "PendingWorkloadsSummary", "items": []})
        waiting["items"].append(pending_workload(name, number, number))
    assert _phases(run, "gpt", "bert") == [("Queued", "WaitingInQueue")] * 2
    fake.requests.clear()
    assert "at place 2 of 2, behind gpt" in run("list", "-o", "json")[1]
    assert fake.asked("GET").count(PENDING) == 1


def test_an_owner_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", fail)
    assert current_owner().startswith("unknown@")
