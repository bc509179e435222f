"""Causes that cluster tests of their own show: found in objects as the API server and the kubelet write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flk.cli.why import text
from flk.health import CAUSES, diagnose, find
from flk.jobs.state import Phase, derive
from flk.observe.needs import RECORD_LINES, needs, with_answer
from flk.observe.observation import Need, What
from flk.observe.source import Reply
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from tests.support.causes import CASES
from tests.support.jobs import MADE, NOW, JobBuilder, record

POD = "gpt-worker-1"
NO_NETWORK = 'Failed to create pod sandbox: plugin type="example" failed (add): no address is left'
FAILURE = Failure(Kind.EXCEPTION, 1, 1, POD, "node-a", 0, NOW - 30, "RuntimeError", "bad shard", "Traceback\n…")


def condition(kind: str, reason: str, message: str, status: str = "True") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": MADE}


def waiting(reason: str, message: str) -> JobBuilder:
    return JobBuilder().pod(0).pod(2).pod(1, "Pending", {"waiting": {"reason": reason, "message": message}})


def unscheduled(message: str) -> JobBuilder:
    said = condition("PodScheduled", "Unschedulable", f"0/3 nodes are available: {message}.", "False")
    return JobBuilder().pod(0).pod(2).pod(1, "Pending", {}, node="", conditions=[said])


def refused(message: str) -> JobBuilder:
    text = f'Error creating: pods "{POD}" is forbidden: {message}'
    return JobBuilder().pod(0).pod(2).event("FailedCreatePod", text)


def failed(kind: str, **values: Any) -> JobBuilder:
    failure = replace(FAILURE, **{"kind": Kind(kind), "type": "", "message": "", **values})
    return JobBuilder().all("ended", int(failure.code), record(failure).to_json()).condition("Failed")


def suspended() -> JobBuilder:
    return JobBuilder().in_queue()


def ignored_by_kueue(**around: Any) -> JobView:
    """A job of a cluster whose Kueue has been asked for the job's Workload and has none."""
    seen = suspended().seen()
    for need in needs(JobView(replace(seen, answered=frozenset({Need(What.EVENTS, "gpt", "PyTorchJob")})))):
        seen = with_answer(seen, need, Reply())
    return JobView(replace(seen, **around))


def workload() -> dict[str, Any]:
    evicted = condition("Evicted", "Preempted", "Preempted to accommodate a workload of higher priority")
    return {"metadata": {"name": "pytorchjob-gpt"}, "status": {"conditions": [evicted]}}


def deactivated(reason: str, message: str) -> dict[str, Any]:
    evicted = condition("Evicted", reason, message)
    return workload() | {"spec": {"active": False}, "status": {"conditions": [evicted]}}


def pod_group() -> dict[str, Any]:
    lacks = condition("Unschedulable", "NotEnoughResources", "3/3 tasks in gang unschedulable")
    status = {"phase": "Inqueue", "conditions": [lacks]}
    return {"metadata": {"name": "gpt"}, "spec": {"minMember": 3}, "status": status}


def node_that_is_silent() -> dict[str, Any]:
    ready = condition("Ready", "NodeStatusUnknown", "Kubelet stopped posting node status.", "Unknown")
    return {"metadata": {"name": "node-b"}, "status": {"conditions": [ready]}}


def in_need_of_a_node(reason: str, message: str) -> JobBuilder:
    """A pod without a node, and what cluster-autoscaler says of it."""
    job = unscheduled("3 Insufficient cpu").event(reason, message, "Pod", POD)
    job.events[-1] |= {"source": {"component": "cluster-autoscaler"}, "type": "Normal"}
    return job


def without_operator() -> JobView:
    """Pods that are gone, and an operator that is scaled to nothing."""
    deployment = {"metadata": {"name": "training-operator", "namespace": "kubeflow"}, "spec": {"replicas": 0}}
    job = JobBuilder().condition("Running").pod(0).ended(2, 137)
    return job.view(controllers={"operator": [{**deployment, "status": {"readyReplicas": 0}}]})


MULTIKUEUE = "kueue.x-k8s.io/multikueue"


def sent(manager: str = MULTIKUEUE, *, suspend: bool = False, flk: bool = True) -> JobBuilder:
    """A job that Kueue has sent to another cluster, as it writes managedBy into a PyTorchJob."""
    job = suspended()
    job.job["spec"]["runPolicy"] |= {"suspend": suspend, "managedBy": manager}
    if not flk:
        del job.job["metadata"]["labels"]["flk.dev/job"]
    return job


def sent_view(job: JobBuilder | None = None, cluster: str = "west") -> JobView:
    status = {"clusterName": cluster} if cluster else {"nominatedClusterNames": ["west", "east"]}
    return (job or sent()).view(workloads=[{"metadata": {"name": "pytorchjob-gpt"}, "status": status}])


def restarted(count: int) -> JobBuilder:
    """Pods that ended by themselves. The operator sends two events for each, and counts them in one."""
    job = JobBuilder().pod(0).pod(2).ran(1, *(f"earlier-{number}" for number in range(count)))
    return job.event("ExitedWithCode", f"Pod: team.{POD} exited with code 139", count=2 * count)


# By the code: what is found, and a part of the sentence.
BUILT: dict[str, tuple[Callable[[], JobView], str]] = {
    "QueueIgnoresJobs": (
        ignored_by_kueue,
        "it is in queue gold, and Kueue has made no Workload for it in 1m: Kueue does not manage PyTorchJobs here",
    ),
    "SentToAnotherCluster": (
        sent_view,
        "Kueue (MultiKueue) has cluster west run the job: its pods and their logs are there, but not the ConfigMaps",
    ),
    "WorkloadDeactivated": (
        lambda: suspended().view(workloads=[deactivated("Deactivated", "The workload is deactivated")]),
        "the job's Workload is deactivated, and queue gold does not start it (Deactivated): The workload is",
    ),
    "PreemptedByQueue": (
        lambda: suspended().view(workloads=[workload()]),
        "queue gold has taken the job's place back (Preempted): Preempted to accommodate",
    ),
    "WaitingForGang": (
        lambda: unscheduled("3 Insufficient cpu").view(pod_groups=[pod_group()]),
        "starts 3 pods together or none, and there is no room for all: 0/3 nodes are available",
    ),
    "NodesNotReady": (
        lambda: unscheduled("3 node(s) were unschedulable").view(),
        "not ready or take no pods (node(s) were unschedulable)",
    ),
    "NodeLost": (
        lambda: JobBuilder().all("pod").pod(1, node="node-b").view(nodes={"node-b": node_that_is_silent()}),
        f"{POD}: node node-b does not answer",
    ),
    "Preempted": (
        lambda: (
            JobBuilder()
            .all("pod")
            .pod(1, "Failed", {}, conditions=[condition("DisruptionTarget", "PreemptionByScheduler", "for pod vip")])
            .view()
        ),
        f"{POD} was preempted: the scheduler gave its place to a pod of higher priority",
    ),
    "Preparing": (
        lambda: JobBuilder().all("pod").view(logs={POD: ["[pod 1] pip: Collecting a"]}),
        f"{POD} installs packages for ",
    ),
    "RankHung": (lambda: failed("hang").view(), f"rank 1 in {POD} makes no progress"),
    "PodNotSetUp": (
        lambda: waiting("ContainerCreating", "").event("FailedCreatePodSandBox", NO_NETWORK, "Pod", POD).view(),
        f"{POD} cannot start: its node node-a cannot set it up: Failed to create pod sandbox",
    ),
    "DevicesNotAllocated": (
        lambda: unscheduled("device class gpu.example.com does not exist").view(),
        f"{POD}: no node can give it the devices that it claims (device class gpu.example.com does not exist)",
    ),
    "OperatorNotRunning": (
        without_operator,
        "the training operator is scaled to 0 pods, so nothing creates gpt-worker-1",
    ),
    "NodeBeingAdded": (
        lambda: in_need_of_a_node("TriggeredScaleUp", "pod triggered scale-up: [{pool 0->1 (max: 3)}]").view(),
        f"{POD}: no node can take it yet, and cluster-autoscaler adds one ([{{pool 0->1 (max: 3)}}])",
    ),
    "NodeNotAddedNow": (
        lambda: in_need_of_a_node(
            "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached"
        ).view(),
        f"{POD}: no node can take it, and cluster-autoscaler can add none now (1 max node group size reached)",
    ),
    "Deleted": (
        lambda: JobView(replace(JobBuilder().all("pod").seen(), gone=NOW)),
        "the job was deleted before it had ended",
    ),
    "NodeFaulty": (
        lambda: failed("gpu", message="CUDA error").view(
            nodes={
                "node-a": {
                    "metadata": {"name": "node-a"},
                    "status": {"conditions": [condition("XidCriticalError", "Xid79", "lost")]},
                }
            }
        ),
        f"{POD}: node node-a reports XidCriticalError (Xid79: lost)",
    ),
}


@pytest.mark.parametrize("code", BUILT)
def test_cause(code: str) -> None:
    make, sentence = BUILT[code]
    view = make()
    found = find(view)[0]
    assert found.code == code, found
    assert sentence in found.sentence
    assert found.remedy
    assert found.evidence
    assert_that_nothing_is_printed_twice(view)


def assert_that_nothing_is_printed_twice(view: JobView) -> None:
    """The evidence says where the headline is read from, and no words of it again."""
    answer = diagnose(view)
    headline, *lines = [line.strip() for line in text(answer, view.now).splitlines() if line]
    sentences = [line for line in lines if " " in line]
    assert not [line for line in sentences if line in headline or _message(line) in headline]
    told = [each.text for each in [*(answer.cause.evidence if answer.cause else ()), *answer.others]]
    assert len({*told}) == len(told)


def _message(line: str) -> str:
    """What follows the reason in a line of evidence, such as ``FailedMount``; the line if it has none."""
    reason, _, message = line.partition(": ")
    return message if " " in message and " " not in reason else line


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("DiskFull", "[Errno 28] No space left on device"),
    ],
)
def test_the_text_of_a_recorded_failure_names_the_cause_and_its_kind_gives_the_exit_code(
    code: str, message: str
) -> None:
    found = find(failed("exception", type="OSError", message=message).view())[0]
    assert (found.code, found.exit_code) == (code, ExitCode.TRAINING)


def test_an_image_without_python_is_to_be_replaced() -> None:
    found = find(failed("usage", message="the image has no python3").view())[0]
    assert found.code == "InvalidStart"
    assert found.remedy.startswith("choose an image that has Python 3.10 or newer and torch; ")
    assert found.remedy.endswith(" has no python3: --image")


@pytest.mark.parametrize(
    ("reason", "phase"), [("Deactivated", Phase.PREEMPTED), ("DeactivatedDueToRequeuingLimitExceeded", Phase.STUCK)]
)
def test_a_queue_does_not_start_a_workload_that_is_deactivated(reason: str, phase: Phase) -> None:
    said = "The workload is deactivated due to exceeding the maximum number of re-queuing retries"
    view = suspended().view(workloads=[deactivated(reason, said)])
    cause = find(view)[0]
    assert cause.code == "WorkloadDeactivated"
    assert (
        "  It may resolve by itself, through somebody who activates the Workload." in text(diagnose(view), NOW)
    ) == (phase == Phase.PREEMPTED)
    assert cause.sentence == f"the job's Workload is deactivated, and queue gold does not start it ({reason}): {said}"
    activate = 'kubectl patch workload pytorchjob-gpt --type merge -p \'{"spec": {"active": true}}\' -n team'
    assert cause.remedy.startswith(f"{activate} has the queue start it again; ")
    assert derive(view).phase == phase


def test_kueue_that_ignores_the_job_leaves_it_stuck() -> None:
    view = ignored_by_kueue()
    state = derive(view)
    assert (state.phase, state.code) == (Phase.STUCK, ExitCode.INFRASTRUCTURE)
    assert state.cause
    assert state.cause.remedy.startswith(
        "submit it with --target job or --target jobset or --target trainjob, or have kubeflow.org/pytorchjob added to "
    )


@pytest.mark.parametrize(
    "around",
    [
        {"time": NOW - 1},  # Kueue has its time
        {"answered": frozenset()},  # nobody has asked for Workloads
        {"unread": {Need(What.WORKLOADS): "the API server did not answer"}},
        {"unreadable": frozenset({"workloads"})},
        {"other_versions": {"workloads": "v9"}},
        {"workloads": [{"metadata": {"name": "w"}, "status": {}}]},
    ],
    ids=lambda around: next(iter(around)),
)
def test_a_job_whose_workload_may_exist_waits_in_its_queue(around: dict[str, Any]) -> None:
    state = derive(ignored_by_kueue(**around))
    assert (state.phase, state.reason) == (Phase.QUEUED, "WaitingInQueue")


def test_a_job_in_a_queue_of_another_scheduler_is_suspended_by_somebody() -> None:
    view = ignored_by_kueue()
    view.seen.job["metadata"]["labels"].clear()  # type: ignore[index]
    view.seen.job["spec"]["runPolicy"]["schedulingPolicy"] = {"queue": "gold"}  # type: ignore[index]
    assert "QueueIgnoresJobs" not in [cause.code for cause in find(JobView(view.seen))]


def test_a_job_that_another_cluster_runs_is_followed_by_its_status() -> None:
    state = derive(sent_view(sent().condition("Running")))
    assert (state.phase, state.reason) == (Phase.RUNNING, "SentToAnotherCluster")
    assert "ConfigMaps" not in state.message  # it has all that it needs
    assert derive(sent_view(sent().condition("Succeeded"))).phase == Phase.SUCCEEDED


def test_a_job_of_flk_that_another_cluster_cannot_start_is_stuck() -> None:
    assert derive(sent_view()).phase == Phase.STUCK
    assert derive(sent_view(sent(flk=False))).phase == Phase.PENDING  # all that its pods need may be in its image
    assert "another cluster" in derive(sent_view(cluster="")).message


def test_a_job_that_has_failed_in_another_cluster_says_where() -> None:
    state = derive(sent_view(sent().condition("Failed")))
    assert (state.phase, state.code) == (Phase.FAILED, ExitCode.INFRASTRUCTURE)
    assert "has cluster west run the job" in state.message


def test_a_job_that_was_in_its_queue_for_long_is_not_stuck_when_it_is_sent() -> None:
    admitted = condition("Admitted", "Admitted", "") | {"lastTransitionTime": "2026-01-01T00:00:55Z"}
    workload = {"metadata": {"name": "w"}, "status": {"clusterName": "west", "conditions": [admitted]}}
    assert derive(sent().view(workloads=[workload])).phase == Phase.PENDING


def test_a_job_with_pods_here_is_not_elsewhere() -> None:
    view = sent_view(sent().pod(0))
    assert "SentToAnotherCluster" not in [cause.code for cause in find(view)]


def test_a_status_of_another_form_says_nothing_of_pods_elsewhere() -> None:
    for status in ({"replicatedJobsStatus": 5}, {"jobsStatus": ["a", None]}):
        job = sent()
        job.job["status"] = status
        assert not sent_view(job).runs_elsewhere


def test_a_job_that_waits_for_another_cluster_is_in_its_queue() -> None:
    assert derive(sent_view(sent(suspend=True), cluster="")).phase == Phase.QUEUED


@pytest.mark.parametrize("manager", ["kubeflow.org/training-operator", "acme.io/controller"])
def test_a_job_of_another_manager_is_not_elsewhere(manager: str) -> None:
    view = sent_view(sent(manager))
    assert "SentToAnotherCluster" not in [cause.code for cause in find(view)]


@pytest.mark.parametrize(
    "status", [{"ready": 2}, {"replicatedJobsStatus": [{"ready": 2}]}, {"jobsStatus": [{"ready": 2}]}]
)
def test_each_kind_of_job_says_that_its_pods_run_elsewhere(status: dict[str, Any]) -> None:
    job = sent()
    job.job["status"] = status
    assert sent_view(job).runs_elsewhere


def test_the_workload_of_a_job_that_is_elsewhere_is_read() -> None:
    seen = sent().seen()
    assert Need(What.WORKLOADS) in needs(JobView(replace(seen, answered=frozenset(needs(JobView(seen))))))


def test_only_a_new_job_has_a_new_secret_of_its_own() -> None:
    job = waiting("CreateContainerConfigError", 'secret "gpt-rendezvous-89abcdef" not found')
    job.job["metadata"]["annotations"] = {"flk.dev/submission": "89abcdef-0123"}
    found = find(job.view())[0]
    assert found.code == "ReferenceMissing"
    assert found.remedy == (
        "flk submit makes it before it ends, and the pods start then; if nobody is submitting the job now, "
        "flk delete gpt -n team and submit it again"
    )


def test_without_a_record_the_cause_gives_the_exit_code() -> None:
    job = JobBuilder().all("ended", 1).condition("Failed")
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 1',
        "OSError: [Errno 28] No space left on device",
    ]
    found = find(job.view(logs={POD: lines}))[0]
    assert (found.code, found.exit_code) == ("DiskFull", ExitCode.INFRASTRUCTURE)


def test_a_preempted_pod_whose_replacement_has_no_place_was_preempted() -> None:
    job = unscheduled("2 Insufficient flk.dev/seat").event("Preempted", "Preempted by pod 4711", "Pod", POD)
    first, second = find(job.view())
    assert (first.code, second.code) == ("Preempted", "NotEnoughResources")
    assert first.pods == second.pods == [POD]


def test_a_pod_that_was_created_again_twice_is_in_no_loop() -> None:
    assert [finding.code for finding in find(restarted(2).view())] == []


def test_every_cause_has_a_test() -> None:
    """A cause is tested by a row of one of the two tables, each of which a test finds again: a mention is no test."""
    codes = [cause.code.lower() for cause in CAUSES]
    assert len(codes) == len(set(codes))
    recorded = {case.expected.code for case in CASES}
    assert {cause.code for cause in CAUSES} == recorded | BUILT.keys()
    assert not recorded & BUILT.keys()


@pytest.mark.promise("Causes: A job is stuck only after the grace of its cause")
@pytest.mark.parametrize(("limit", "phase"), [("5", Phase.STUCK), ("6", Phase.PENDING)])
def test_a_quota_is_stuck_that_the_pods_of_the_job_itself_fill(limit: str, phase: Phase) -> None:
    job = refused(f"exceeded quota: q, requested: cpu=2, used: cpu=4, limited: cpu={limit}")
    view = job.view()
    view.now = NOW + 600
    assert derive(view).phase == phase
    elastic = refused(f"exceeded quota: q, requested: cpu=2, used: cpu=4, limited: cpu={limit}")
    elastic.container["env"] = [{"name": "FLK_MIN_PODS", "value": "2"}, {"name": "FLK_PODS", "value": "3"}]
    view = elastic.view()
    view.now = NOW + 600
    assert derive(view).phase == Phase.PENDING
    roles = refused(f"exceeded quota: q, requested: cpu=2, used: cpu=4, limited: cpu={limit}")
    specs = roles.job["spec"]["pytorchReplicaSpecs"]
    specs["Master"] = {**specs["Worker"], "replicas": 1}  # which may ask for less
    specs["Worker"] = {**specs["Worker"], "replicas": 2}
    view = roles.view()
    view.now = NOW + 600
    assert derive(view).phase == Phase.PENDING


LEADER_WAITS = "[pod 0] 1 of 2 pods have joined; waiting for pod 1"
UNRESOLVED = "[pod 1] waiting for the launcher of pod 0 at gpt-worker-0:29400 since 60 s: Name or service not known"


@pytest.mark.parametrize(
    ("refusal", "code", "said"),
    [
        (
            "exceeded quota: q, requested: services=1, used: services=0, limited: services=0",
            "QuotaExceeded",
            "the job needs 2 services, and quota q has 0 in all: it can never run",
        ),
        (
            "exceeded quota: q, requested: services=1, used: services=5, limited: services=5",
            "QuotaExceeded",
            "quota q is used up",
        ),
        (
            'admission webhook "policy.example" denied the request: no services',
            "PodRefused",
            'admission webhook "policy.example" denied the request: no services',
        ),
    ],
)
def test_a_service_that_is_refused_is_why_the_name_does_not_resolve(refusal: str, code: str, said: str) -> None:
    job = JobBuilder(2).all("pod").condition("Running")
    wait = {"gpt-worker-0": [LEADER_WAITS], POD: [UNRESOLVED]}
    about = Need(What.EVENTS, "gpt", "PyTorchJob")
    assert about in needs(
        job.view(logs=wait, answered=frozenset({Need(What.RECORD, "gpt-worker-0", lines=RECORD_LINES)}))
    )
    assert [finding.code for finding in find(job.view(logs=wait))] == ["NameNotResolved"]
    job.event("FailedCreateService", f'Error creating: services "gpt-worker-0" is forbidden: {refusal}')
    finding = find(job.view(logs=wait))[0]
    assert finding.code == code
    assert finding.sentence.startswith("a service by which the pods find each other cannot be created: ")
    assert said in finding.sentence
    assert not find(job.view(logs={"gpt-worker-0": ["[rank 0] step 1"]}))  # the ranks have met without it
    job.event("SuccessfulCreateService", "Created service: gpt-worker-0")
    assert [finding.code for finding in find(job.view(logs=wait))] == ["NameNotResolved"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["[pod 0] installing packages: a", "[pod 0] pip: Collecting a"], "installs packages for 1m; its last line: "),
        (["[pod 0] running the setup command: true"], "runs the setup command for 1m; its last line: true"),
        (["[pod 0] setup: x", "[pod 0] the setup command has ended after 3 s"], ""),
        (["[pod 0] pip: x", "[rank 0] setup: x"], ""),
    ],
)
def test_a_job_whose_pods_are_being_prepared_starts(lines: list[str], said: str) -> None:
    # The other launcher waits for it, which is no fault of it.
    waits = ["[pod 1] waiting for the launcher of pod 0 at gpt-worker-0:29400 since 60 s: Connection refused"]
    view = JobBuilder(2).all("pod").view(logs={"gpt-worker-0": lines, POD: waits})
    state = derive(view)
    assert (state.reason == "Preparing") == bool(said)
    if said:
        assert said in state.message
        assert state.phase is Phase.STARTING
