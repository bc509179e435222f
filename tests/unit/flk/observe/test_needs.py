"""Which requests an observation needs is a pure function of it, and ends once they are answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flk.__main__ import main
from flk.cli.status import pods_table
from flk.health import find
from flk.jobs.state import Phase, derive
from flk.observe.client import JobClient
from flk.observe.needs import needs, with_answer
from flk.observe.observation import Need, Observation, What
from flk.observe.progress import Progress
from flk.observe.reader import view_job
from flk.observe.source import Reply
from flk.observe.view import JobView
from flk.spec.units import timestamp
from flk_runtime.contract.log_format import RECORD_MARKER
from tests.support.jobs import MADE, NOW, JobBuilder, record
from tests.unit.flk.cli.outputs import jobs


def asked(seen: Observation) -> list[list[tuple[str, str]]]:
    """Return the requests of each round, if none of them finds anything."""
    rounds = []
    while wanted := needs(JobView(seen)):
        rounds.append([(need.what.value, need.name) for need in wanted])
        for need in wanted:
            seen = with_answer(seen, need, Reply())
    return rounds


def test_a_job_that_runs_undisturbed_needs_its_record_only() -> None:
    # A silent pod 0 has another launcher asked, too.
    assert asked(jobs.running().seen()) == [[("record", "gpt-worker-0")], [("peer", "gpt-worker-1")]]


def test_a_record_tells_that_a_job_runs_undisturbed() -> None:
    seen = jobs.running().seen()
    line = f"{MADE} [pod 0] {RECORD_MARKER}{record(None, outcome='running').to_json()}"
    seen = with_answer(seen, needs(JobView(seen))[0], Reply(lines=[line, f"{MADE} [rank 0] step 1"]))
    assert seen.record is not None
    assert seen.logs == {"gpt-worker-0": ["[rank 0] step 1"]}
    assert needs(JobView(seen)) == []


def test_each_worker_of_diloco_shows_its_own_step_and_pods_that_print_none_that_of_their_worker() -> None:
    job = JobBuilder(4).all("pod").condition("Running")
    job.container["env"] = [{"name": "FLK_WORKERS", "value": "2"}]
    seen, logs = job.seen(), {"gpt-worker-0": 7, "gpt-worker-2": 5}
    assert {(need.what.value, need.name) for need in needs(JobView(seen))} >= {("metrics", "gpt-worker-2")}
    for need in needs(JobView(seen)):
        rank = int(need.name[-1])
        seen = with_answer(seen, need, Reply(lines=[f'{MADE} [rank {rank}] {{"step": {logs[need.name]}}}']))
    state = derive(JobView(seen))
    header, *rows = pods_table(state, wide=False)
    assert [row[header.index("STEP") :].split()[0] for row in rows] == ["7", "7", "5", "5"]


def test_pods_of_an_elastic_job_show_the_step_that_all_make_and_those_that_wait_none() -> None:
    job = JobBuilder(3).all("pod").condition("Running")
    job.container["env"] = [{"name": "FLK_MIN_PODS", "value": "1"}]
    running = record(None, None, outcome="running")
    job.record = replace(running, attempts=[replace(running.attempts[-1], pods="0, 2")])
    state = derive(job.view(progress=[Progress(0, 7, NOW)]))
    header, *rows = pods_table(state, wide=False)
    assert [row[header.index("STEP") :].split()[0] for row in rows] == ["7", "-", "7"]


def test_a_job_that_has_succeeded_needs_nothing() -> None:
    assert needs(jobs.succeeded().view()) == []


def test_pods_without_a_node_need_events_and_then_nodes() -> None:
    first, second = asked(jobs.unschedulable().seen())
    assert ("events", "gpt") in first
    assert 1 < len(first) <= 5  # of a few pods only
    assert ("nodes", "") in second


def test_a_pod_without_a_node_needs_events_and_nodes_at_once_and_one_that_starts_only_later() -> None:
    first, second = asked(replace(jobs.unschedulable().seen(answered=frozenset()), time=timestamp(MADE) + 1))
    assert ("events", "gpt-worker-0") in first
    assert ("nodes", "") in second
    made = JobBuilder().all("pod", "Pending", {"waiting": {"reason": "ContainerCreating"}})
    starting = made.seen(answered=frozenset())
    early, late = (asked(replace(starting, time=timestamp(MADE) + seconds)) for seconds in (1, 60))
    assert ("events", "gpt-worker-0") not in early[0]
    assert ("events", "gpt-worker-0") in late[0]


def test_events_of_an_earlier_job_of_the_name_are_left_out() -> None:
    seen = JobBuilder().seen()
    about = {"kind": "PyTorchJob", "name": "gpt", "uid": "another"}
    events = [{"metadata": {"name": "e"}, "involvedObject": about, "lastTimestamp": MADE}]
    assert with_answer(seen, Need(What.EVENTS, "gpt", "PyTorchJob"), Reply(events)).events == []


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
@pytest.mark.usefixtures("kubeconfig")
def test_what_waits_in_a_queue_is_read_in_the_version_that_the_cluster_serves(fake: Any, version: str) -> None:
    job = JobBuilder().in_queue()
    job.add_to(fake)
    path = f"/apis/visibility.kueue.x-k8s.io/{version}/namespaces/team/localqueues/gold/pendingworkloads"
    fake.documents[path] = {"kind": "PendingWorkloadsSummary", "items": [{"metadata": {"name": "w"}}]}
    client = JobClient.connect(namespace="team")
    assert [each["metadata"]["name"] for each in view_job(client, "gpt").seen.pending_workloads] == ["w"]
    fake.refused[path] = (403, 'localqueues "gold" is forbidden: User "ada" cannot get resource "localqueues"')
    assert "pendingworkloads" in view_job(client, "gpt").seen.unreadable


def pending_workload(job: str, cluster_queue: int, local_queue: int) -> dict[str, Any]:
    """A PendingWorkload as Kueue's Visibility API answers it."""
    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": job, "uid": f"uid-{job}"}
    meta = {
        "name": f"pytorchjob-{job}-1a2b3",
        "namespace": "team",
        "creationTimestamp": MADE,
        "ownerReferences": [owner],
    }
    places = {"positionInClusterQueue": cluster_queue, "positionInLocalQueue": local_queue}
    return {"metadata": meta, "priority": 0, "localQueueName": "gold", **places}


@pytest.mark.parametrize("command", ["why", "status", "wait"])
@pytest.mark.usefixtures("kubeconfig")
def test_commands_say_the_place_in_the_queue_and_who_is_ahead(fake: Any, capsys: Any, command: str) -> None:
    job = JobBuilder().in_queue()
    job.add_to(fake)
    meta = {"name": "pytorchjob-gpt-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": "uid-gpt"}}
    short = "couldn't assign flavors to pod set worker: insufficient unused quota for nvidia.com/gpu in flavor h100"
    reserved = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": short}
    fake.add("workloads", {"metadata": meta, "status": {"conditions": [reserved]}})
    summary = {"kind": "PendingWorkloadsSummary", "apiVersion": "visibility.kueue.x-k8s.io/v1beta1", "metadata": {}}
    waiting = [pending_workload("bert", 1, 0), pending_workload("gpt", 3, 1), pending_workload("later", 7, 2)]
    path = "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/team/localqueues/gold/pendingworkloads"
    fake.documents[path] = {**summary, "items": waiting}
    main([command, "gpt", *(["--timeout", "1s"] if command == "wait" else [])])
    said = capsys.readouterr()
    place = "it waits in queue gold at place 2 of 3, behind bert and 2 jobs of other queues: couldn't assign flavors"
    assert place in said.out + said.err


@pytest.mark.usefixtures("kubeconfig")
def test_a_job_in_a_queue_waits_for_ever_where_there_is_no_kueue(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flk.kube.discovery.KEPT", -1.0)
    job = JobBuilder().in_queue()
    job.add_to(fake)
    ignored = find(view_job(JobClient.connect(namespace="team"), "gpt"))[0]
    assert (ignored.code, ignored.resolves_itself) == ("QueueIgnoresJobs", False)
    del fake.objects["/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads"]
    cause = find(view_job(JobClient.connect(namespace="team"), "gpt"))[0]
    assert (cause.code, cause.resolves_itself) == ("WaitingInQueue", False)
    said = "it waits in queue gold, and nobody starts it: the cluster of context fake does not serve "
    assert cause.sentence == f"{said}workloads.kueue.x-k8s.io"
    assert derive(view_job(JobClient.connect(namespace="team"), "gpt")).phase == Phase.STUCK
    fake.objects["/apis/kueue.x-k8s.io/v9/namespaces/team/workloads"] = {}
    view = view_job(JobClient.connect(namespace="team"), "gpt")
    said = (
        "it waits in queue gold, and flk cannot read why: the cluster of context fake serves workloads.kueue.x-k8s.io"
    )
    assert find(view)[0].sentence.startswith(f"{said} in version v9 only")
    assert derive(view).phase == Phase.QUEUED


@pytest.mark.usefixtures("kubeconfig")
def test_the_metrics_of_a_further_worker_of_diloco_are_read(fake: Any) -> None:
    job = JobBuilder(2).all("pod").condition("Running")
    job.container["env"] = [{"name": "FLK_WORKERS", "value": "2"}]
    job.add_to(fake)
    for rank, step in enumerate((7, 5)):
        fake.written[f"gpt-worker-{rank}"] = f'[rank {rank}] {{"step": {step}}}\n'
    found = view_job(JobClient.connect(namespace="team"), "gpt").seen.progress
    assert [(each.rank, each.step) for each in found] == [(0, 7), (1, 5)]


def test_what_may_not_be_read_is_known_and_not_asked_again() -> None:
    seen = jobs.unschedulable().seen()
    need = Need(What.NODES)
    seen = with_answer(seen, need, Reply(unreadable=frozenset({"nodes"})))
    assert seen.unreadable == {"nodes"}
    assert need not in needs(JobView(seen))
