"""Clusters that add nodes by themselves: who adds a node, who cannot, and what is said before a job is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from flk.health import find
from flk.health.cluster import Cluster, Level, Pods, Unreadable
from flk.health.queue import EVICTED, PENDING
from flk.health.scheduling import SHORT, before, of_cluster
from flk.jobs.state import Phase, derive
from flk.manifest import Bundle, render
from flk.observe.view import JobView
from flk.spec.job import validated
from flk.spec.names import DEFAULT_IMAGE, IMAGE_ARCHITECTURE
from flk.user.commands import Commands
from tests.support.jobs import MADE, NOW, JobBuilder

DIFFERS = "node(s) didn't match Pod's node affinity/selector"
SELECTOR = f"3 {DIFFERS}"
GROUP = "pod triggered scale-up: [{gpu-pool 0->1 (max: 3)}]"
KARPENTER = 'Failed to schedule pod, incompatible with nodepool "default", did not tolerate taint gpu=true:NoSchedule'


def pending(message: str = SELECTOR, pods: int = 3) -> JobBuilder:
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "lastTransitionTime": MADE}
    said["message"] = f"0/3 nodes are available: {message}."
    job = JobBuilder(pods).all("pod", "Pending", {}, node="", conditions=[said])
    for pod in job.pods.values():
        pod["spec"]["nodeSelector"] = {"gpu": "h100"}
    return job


def says(job: JobBuilder, reason: str, message: str, who: str = "cluster-autoscaler", second: int = 10) -> JobBuilder:
    job.event(reason, message, "Pod", "gpt-worker-0", at=f"2026-01-01T00:00:{second:02}Z", uid="pod-0")
    job.events[-1] |= {"source": {"component": who}, "type": "Normal"}
    return job


def later(job: JobBuilder, seconds: float = 3600, **around: Any) -> JobView:
    view = job.view(**around)
    view.now = NOW + seconds
    return view


@pytest.mark.parametrize(
    ("reason", "message", "who", "text"),
    [
        ("TriggeredScaleUp", GROUP, "cluster-autoscaler", "[{gpu-pool 0->1 (max: 3)}]"),
        (
            "Nominated",
            "Pod should schedule on: nodeclaim/gpu-x7k2p",
            "karpenter",
            "Pod should schedule on: nodeclaim/gpu-",
        ),
    ],
)
@pytest.mark.parametrize(
    "why", [SELECTOR, "3 node(s) had untolerated taint {gpu: true}", "3 Insufficient nvidia.com/gpu", ""]
)
def test_a_job_that_gets_a_node_is_pending(reason: str, message: str, who: str, text: str, why: str) -> None:
    view = later(says(pending(why), reason, message, who), 1200)
    cause, state = find(view)[0], derive(view)
    assert cause.code == "NodeBeingAdded"
    assert cause.sentence.startswith(
        f"gpt-worker-0 and 2 other pods: no node can take it yet, and {who} adds one ({text}"
    )
    assert cause.since == NOW - 50
    assert (state.phase, state.reason) == (Phase.PENDING, "NodeBeingAdded")
    view.now += 600  # it has had its time
    assert derive(view).phase == Phase.STUCK


@pytest.mark.parametrize(
    ("reason", "message", "who"),
    [
        ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached", "cluster-autoscaler"),
        ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up", "cluster-autoscaler"),
        ("FailedScaleUp", "Node scale up in zones a failed: GCE out of resources.", "cluster-autoscaler"),
        (
            "FailedScheduling",
            "Failed to schedule pod, all available instance types exceed limits for nodepool",
            "karpenter",
        ),
    ],
)
def test_a_group_of_nodes_that_cannot_grow_now_may_grow_later(reason: str, message: str, who: str) -> None:
    view = later(says(pending(), reason, message, who))
    assert (find(view)[0].code, derive(view).phase) == ("NodeNotAddedNow", Phase.PENDING)


@pytest.mark.parametrize(
    ("reason", "message", "who"),
    [
        (
            "NotTriggerScaleUp",
            "pod didn't trigger scale-up: 2 node(s) didn't match Pod's node affinity",
            "cluster-autoscaler",
        ),
        ("FailedScheduling", KARPENTER, "karpenter"),
    ],
)
def test_an_autoscaler_that_will_add_no_node_is_evidence(reason: str, message: str, who: str) -> None:
    view = later(says(pending(), reason, message, who))
    (cause,) = find(view)
    assert (cause.code, derive(view).phase) == ("NodeSelectorMismatch", Phase.STUCK)
    assert message in cause.evidence[1].text


def test_the_last_word_of_the_autoscaler_counts() -> None:
    job = says(
        says(pending(), "TriggeredScaleUp", GROUP), "NotTriggerScaleUp", "pod didn't trigger scale-up: ", second=20
    )
    assert find(later(job))[0].code == "NodeSelectorMismatch"
    says(job, "TriggeredScaleUp", GROUP, second=30)
    (cause,) = find(later(job))
    assert (cause.code, cause.since) == ("NodeBeingAdded", NOW - 30)


def test_the_scheduler_is_no_autoscaler_and_an_earlier_pod_is_another_one() -> None:
    job = says(pending(), "FailedScheduling", f"0/3 nodes are available: {SELECTOR}.", "default-scheduler")
    (cause,) = find(later(job))
    assert (cause.code, len(cause.evidence)) == ("NodeSelectorMismatch", 2)
    job = says(pending(), "TriggeredScaleUp", GROUP)
    job.events[-1]["involvedObject"]["uid"] = "earlier"
    assert find(later(job))[0].code == "NodeSelectorMismatch"


def test_stuck_after_limits_the_wait_for_a_node() -> None:
    job = says(pending(), "TriggeredScaleUp", GROUP)
    job.job["metadata"]["labels"] |= {"flk.dev/stuck-after": "1800"}
    assert derive(later(job, 1749)).phase == Phase.PENDING
    assert derive(later(job, 1750)).phase == Phase.STUCK
    alone = pending()  # nobody adds a node, and the user gives the job as much time
    alone.job["metadata"]["labels"] |= {"flk.dev/stuck-after": "1800"}
    assert derive(later(alone, 1739)).phase == Phase.PENDING
    assert derive(later(alone, 1740)).phase == Phase.STUCK


@pytest.mark.parametrize(("limit", "fits", "stuck"), [(20, 1, True), (300, 1, False), (20, 9, True), (300, 9, True)])
def test_stuck_after_is_about_pods_that_a_quota_refuses_too(limit: int, fits: int, stuck: bool) -> None:
    """A minute after the creation. Of two pods, a quota that others use may have room later; a smaller one has not."""
    job = JobBuilder(2)
    job.job["metadata"]["labels"] |= {"flk.dev/stuck-after": str(limit)}
    message = f"exceeded quota: team, requested: cpu={fits}, used: cpu=2, limited: cpu=2"
    state = job.event("FailedCreatePod", f"Error creating: pods is forbidden: {message}").state()
    assert (state.reason, state.phase == Phase.STUCK) == ("QuotaExceeded", stuck)


def test_stuck_after_is_about_nodes_only() -> None:
    said = {"reason": "CreateContainerConfigError", "message": "couldn't find key x in Secret team/s"}
    job = JobBuilder().all("pod", "Pending", {"waiting": said})
    job.job["metadata"]["labels"] |= {"flk.dev/stuck-after": "86400"}
    assert derive(job.view()).phase == Phase.STUCK


@pytest.mark.parametrize(
    ("message", "code", "phase"),
    [
        ("request device: device class absent does not exist", "DevicesNotAllocated", Phase.STUCK),
        ("3 node(s) didn't match pod anti-affinity rules", "Unschedulable", Phase.STUCK),
        ("3 node(s) didn't match pod topology spread constraints", "Unschedulable", Phase.STUCK),
        ("3 node(s) didn't have free ports for the requested pod ports", "Unschedulable", Phase.PENDING),
        ("2 node(s) didn't have free ports for the requested pod ports, 1 Insufficient cpu", SHORT, Phase.PENDING),
    ],
)
def test_what_only_a_change_of_the_job_resolves_leaves_it_stuck(message: str, code: str, phase: Phase) -> None:
    job = pending(message)
    assert (derive(later(job)).reason, derive(later(job)).phase) == (code, phase)
    assert derive(later(job, -10)).phase == Phase.PENDING  # the grace


def test_a_pod_that_a_gate_holds_back_hides_no_reason_of_another() -> None:
    job = pending("3 Insufficient cpu")
    job.pods[0]["status"]["conditions"][0] |= {"reason": "SchedulingGated", "message": "Scheduling is blocked"}
    (cause,) = find(later(job))
    assert (cause.code, cause.pods) == (SHORT, ["gpt-worker-1", "gpt-worker-2"])


def node(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a", "labels": {}}, "spec": spec, "status": {"allocatable": {"cpu": "4", "pods": "9"}}}


@pytest.mark.parametrize("message", [SELECTOR, "3 node(s) had untolerated taint {gpu: true}", "3 Insufficient cpu"])
def test_the_autoscaler_of_a_cloud_has_time_to_speak(message: str) -> None:
    job = pending(message)
    job.container["resources"] = {"requests": {"cpu": "8"}}
    for pod in job.pods.values():
        pod["spec"]["nodeSelector"] = {"gpu": "h100"} if message == SELECTOR else {}
    cloud = {"a": node(providerID="gce://project/zone/a")}
    view = later(job, 120, nodes=cloud)
    assert derive(view).phase == Phase.PENDING
    assert "an autoscaler of Google Cloud may add a node" in find(view)[0].evidence[-1].text
    assert derive(later(job, 120, nodes={"a": node()})).phase == Phase.STUCK
    assert derive(later(job, 600, nodes=cloud)).phase == Phase.STUCK
    says(job, "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 node(s) didn't match")
    assert derive(later(job, 120, nodes=cloud)).phase == Phase.STUCK


@pytest.mark.parametrize("message", [SELECTOR, "3 node(s) had untolerated taint {gpu: true}", "3 Insufficient cpu"])
@pytest.mark.parametrize("group", ["autoscaling.x-k8s.io", "cluster-autoscaler.kubernetes.io"])
def test_a_provisioning_request_may_take_hours(message: str, group: str) -> None:
    job = pending(message)
    job.container["resources"] = {"requests": {"cpu": "8"}}
    for pod in job.pods.values():
        pod["spec"]["nodeSelector"] = {"gpu": "h100"} if message == SELECTOR else {}
    assert derive(later(job, nodes={"a": node()})).phase == Phase.STUCK
    for pod in job.pods.values():
        pod["metadata"]["annotations"] = {f"{group}/consume-provisioning-request": "gpt-nodes"}
    view = later(job, nodes={"a": node()})
    assert derive(view).phase == Phase.PENDING
    assert find(view)[0].evidence[-1].text == "gpt-nodes"
    assert derive(later(says(job, "TriggeredScaleUp", GROUP))).phase == Phase.PENDING


def in_queue() -> JobBuilder:
    return JobBuilder().in_queue()


def waiting_in_queue(name: str, position: int, *owners: str) -> dict[str, Any]:
    """A PendingWorkload of Kueue's Visibility API."""
    metadata = {"name": name, "ownerReferences": [{"name": owner} for owner in owners]}
    return {"metadata": metadata, "localQueueName": "gold", "positionInClusterQueue": position}


@pytest.mark.parametrize(
    ("before", "place"),
    [
        ([], "place 1 of 2"),
        ([("w-a", 0, "a"), ("w-b", 2)], "place 3 of 4, behind a, w-b and 2 jobs of other queues"),
        ([(f"w-{n}", n, f"j{n}") for n in range(5)], "place 6 of 7, behind j0, j1, j2 and 2 more"),
        (
            [(f"w-{n}", n, f"j{n}") for n in range(998)],
            "place 1000 of 1000 or more, behind j0, j1, j2 and 996 more",
        ),
    ],
    ids=["first", "others", "many", "more than Kueue lists"],
)
def test_a_job_in_a_queue_says_its_place_and_who_is_ahead(before: list[Any], place: str) -> None:
    own = 4 if len(before) == 2 else len(before)
    found = [waiting_in_queue("w-later", 9, "later"), *(waiting_in_queue(*each) for each in before)]
    found.append(waiting_in_queue("w", own, "gpt"))
    lacks = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for gpu"}
    workload = {"metadata": {"name": "w"}, "status": {"conditions": [lacks]}}
    (cause,) = find(in_queue().view(workloads=[workload], pending_workloads=found))
    assert cause.sentence == f"it waits in queue gold at {place}: insufficient quota for gpu"
    assert place in [item.text for item in cause.evidence]
    (unknown,) = find(in_queue().view(workloads=[workload], pending_workloads=found[:-1]))
    assert unknown.sentence == "it waits in queue gold: insufficient quota for gpu"


@pytest.mark.parametrize("reason", PENDING)
def test_a_reason_of_the_queue_has_its_remedy_and_those_that_last_leave_the_job_stuck(reason: str) -> None:
    lacks = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": "no", "lastTransitionTime": MADE}
    view = in_queue().view(workloads=[{"metadata": {"name": "w"}, "status": {"conditions": [lacks]}}])
    (cause,) = find(view)
    assert cause.sentence == "it waits in queue gold: no"
    assert cause.remedy.startswith(f"{PENDING[reason].remedy}; ")
    assert cause.evidence[0].text == f"{reason}: no"
    view.now = NOW + 600
    stuck = PENDING[reason].lasts
    state = derive(view)
    assert (state.phase, state.code) == ((Phase.STUCK, 104) if stuck else (Phase.QUEUED, 101))


def test_a_job_of_hours_whose_reason_changes_has_its_minute() -> None:
    """The time of a condition is that of its status, and not of its reason."""
    lacks = {"type": "QuotaReserved", "status": "False", "reason": "Misconfigured", "message": "no"}
    written = [{"manager": "kueue", "time": MADE}, {"manager": "kueue", "time": "2026-01-01T05:00:00Z"}]
    about = {"metadata": {"name": "w", "managedFields": written}}
    view = in_queue().view(workloads=[{**about, "status": {"conditions": [lacks | {"lastTransitionTime": MADE}]}}])
    (cause,) = find(view)
    assert [cause.is_stuck(NOW - 60 + 5 * 3600 + seconds) for seconds in (59, 60)] == [False, True]


def test_a_queue_that_an_evicted_job_can_never_return_to_is_told_first() -> None:
    gone = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "no", "lastTransitionTime": MADE}
    lacks = {"type": "QuotaReserved", "status": "False", "message": "no", "lastTransitionTime": MADE}
    for reason, code in (("ExceedsMaxQuota", "WaitingInQueue"), ("WaitingForQuota", "PreemptedByQueue")):
        status = {"conditions": [gone, lacks | {"reason": reason}]}
        view = later(in_queue(), workloads=[{"metadata": {"name": "w"}, "status": status}])
        assert [cause.code for cause in find(view)] == [code]
        assert (derive(view).phase == Phase.STUCK) == (code == "WaitingInQueue")


def test_a_queue_that_does_not_exist_leaves_the_job_stuck_before_kueue_0_19_too() -> None:
    lacks = {"type": "QuotaReserved", "status": "False", "reason": "Inadmissible", "lastTransitionTime": MADE}
    lacks |= {"message": "LocalQueue gold doesn't exist"}
    view = in_queue().view(workloads=[{"metadata": {"name": "w"}, "status": {"conditions": [lacks]}}])
    view.now = NOW + 600
    assert derive(view).phase == Phase.STUCK


@pytest.mark.parametrize("reason", [*EVICTED, "FlavorMigration"])
def test_a_reason_of_an_eviction_has_its_remedy(reason: str) -> None:
    gone = {"type": "Evicted", "status": "True", "reason": reason, "message": "no", "lastTransitionTime": MADE}
    (cause,) = find(in_queue().view(workloads=[{"metadata": {"name": "w"}, "status": {"conditions": [gone]}}]))
    assert (cause.code, cause.resolves_itself) == ("PreemptedByQueue", True)
    assert f"has taken the job's place back ({reason}): no" in cause.sentence
    assert cause.remedy.endswith(f"; {EVICTED[reason].remedy}" if reason in EVICTED else "there is room")


@pytest.mark.parametrize("state", ["Pending", "Retry", "Rejected"])
def test_an_admission_check_of_the_queue_says_who_makes_the_nodes(state: str) -> None:
    job = in_queue()
    reserved = {"type": "QuotaReserved", "status": "True", "message": "Quota reserved in ClusterQueue c"}
    check = {"name": "dws", "state": state, "message": "waiting for nodes", "lastTransitionTime": MADE}
    status = {"conditions": [reserved], "admissionChecks": [{"name": "other", "state": "Ready"}, check]}
    (cause,) = find(job.view(workloads=[{"metadata": {"name": "w"}, "status": status}]))
    assert (cause.code, cause.resolves_itself) == ("WaitingInQueue", state != "Rejected")
    assert f"the admission check dws holds it back ({state}: waiting for nodes)" in cause.sentence


def test_who_may_add_nodes() -> None:
    assert of_cluster([node()], False, False) == ""
    assert of_cluster([node(providerID="kind://docker/flk/a")], False, False) == ""
    assert of_cluster([node(providerID="gce://project/zone/a")], False, False) == "Google Cloud"
    assert of_cluster([node(providerID="aws:///zone/i-1")], False, False) == "AWS"
    assert of_cluster([], True, True) == "Karpenter"
    assert of_cluster([], False, True) == "cluster-autoscaler"


def cluster(autoscaler: str, nodes: list[dict[str, Any]]) -> Cluster:
    nothing = Unreadable("not read")
    read = dict.fromkeys(("version", "api", "rights", "pending"), nothing)
    commands = Commands("team")
    return Cluster("team", commands, controllers={}, nodes=nodes, autoscaler=autoscaler, **read)


def a_job(**spec: Any) -> Pods:
    job = JobBuilder()
    worker = job.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    worker |= spec
    return Pods(job.job)


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ({"nodeSelector": {"gpu": "h100"}}, [node()]),
        ({}, []),
        ({}, [node(taints=[{"key": "dedicated", "effect": "NoSchedule"}])]),
        ({"containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": "8"}}}]}, [node()]),
        ({"containers": [{"name": "pytorch", "resources": {"requests": {"cpu": "64"}}}]}, [node()]),
    ],
)
def test_what_no_node_can_run_now_is_refused_only_without_an_autoscaler(spec: Any, nodes: Any) -> None:
    (refused,) = before(cluster("", nodes), a_job(**spec))
    (warned,) = before(cluster("Karpenter", nodes), a_job(**spec))
    assert (refused.level, warned.level) == (Level.FAILED, Level.WARNING)
    assert warned.found == f"{refused.found}: no node now; an autoscaler may add one (Karpenter)"
    assert (warned.code, warned.remedy) == (refused.code, f"if it adds none: {refused.remedy}")


def test_a_cluster_without_nodes_for_the_default_image_needs_another_image() -> None:
    arm = {**node(), "metadata": {"name": "a", "labels": {"kubernetes.io/arch": "arm64"}}}
    job, *_ = render(validated({"command": "train.py", "name": "gpt"}), Bundle())
    (refused,) = before(cluster("", [arm]), Pods(job))
    assert (refused.code, refused.found) == ("NodeSelectorMismatch", "no node has the labels kubernetes.io/arch=amd64")
    remedy = ", or choose an image for the architecture of the nodes (--image)"
    assert refused.remedy.endswith(remedy)
    assert remedy not in find(later(pending()))[0].remedy
    found = find(later(of_default_image(pending()), nodes={"a": arm}))[0]
    assert "no node that could take them has the labels kubernetes.io/arch=amd64" in found.sentence
    assert found.remedy.endswith(remedy)


def of_default_image(job: JobBuilder, *terms: Any, **selector: str) -> JobBuilder:
    """The job as one that names no image: flk selects nodes of the default image's architecture."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    for pod in job.pods.values():
        pod["spec"]["containers"][0]["image"] = DEFAULT_IMAGE
        pod["spec"]["nodeSelector"] = {**IMAGE_ARCHITECTURE, **selector}
        pod["spec"]["affinity"] = {"nodeAffinity": required}
    return job


H100: Any = {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["H100"]}]}
AMD, ARM = ({"kubernetes.io/arch": each} for each in ("amd64", "arm64"))


@pytest.mark.parametrize(
    ("job", "nodes", "says"),
    [
        (([H100], {}), [AMD, AMD], "no node matches the required node affinity"),
        (([H100], {}), [], "no node matches the required node affinity"),
        (([H100], {}), [AMD, ARM | {"gpu": "H100"}], "labels kubernetes.io/arch=amd64"),
        (([], {"pool": "a"}), [AMD, AMD], "labels pool=a"),
        (([], {"pool": "a"}), [AMD, ARM | {"pool": "a"}], "labels kubernetes.io/arch=amd64, pool=a"),
        (([], {}), [], "labels kubernetes.io/arch=amd64"),
        (([H100], ARM), [AMD], "labels kubernetes.io/arch=arm64"),
    ],
)
def test_the_default_images_architecture_is_named_if_it_alone_keeps_nodes_away(job: Any, nodes: Any, says: str) -> None:
    seen = {str(index): {**node(), "metadata": {"name": "a", "labels": labels}} for index, labels in enumerate(nodes)}
    found = find(later(of_default_image(pending(), *job[0], **job[1]), nodes=seen))[0]
    assert (found.code, found.sentence.rpartition(says)[2]) == ("NodeSelectorMismatch", "")
    assert ("(--image)" in found.remedy) is ("amd64" in says)


def test_a_node_of_the_default_images_architecture_may_come_back() -> None:
    job = of_default_image(pending(f"1 node(s) were unschedulable, 2 {DIFFERS}"))
    assert (find(later(job))[0].code, derive(later(job)).phase) == ("NodesNotReady", Phase.PENDING)
