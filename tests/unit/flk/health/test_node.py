"""Faults that a node or the status of a pod reports: they are named before the code of the user is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flk.health import find
from flk.health.why import diagnose
from flk.jobs.state import derive
from flk.observe.needs import needs, with_answer
from flk.observe.observation import Need, What
from flk.observe.source import Reply
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from tests.support.jobs import MADE, NOW, JobBuilder, record

POD, NODE = "gpt-worker-1", "node-b"
CUDA = Failure(Kind.EXCEPTION, 1, 1, POD, NODE, 0, NOW - 30, "RuntimeError", "CUDA error: unspecified launch failure")


def node(*conditions: tuple[str, str], taint: str = "") -> dict[str, Any]:
    """A node with conditions of these types and statuses, as node-problem-detector and the like write them."""
    said = [
        {"type": kind, "status": status, "reason": "Why", "message": "what happened", "lastTransitionTime": MADE}
        for kind, status in conditions
    ]
    taints = [{"key": taint, "value": "true", "effect": "NoSchedule"}] if taint else []
    return {"metadata": {"name": NODE}, "spec": {"taints": taints}, "status": {"conditions": said}}


def ended(failure: Failure) -> JobBuilder:
    return JobBuilder().all("ended", int(failure.code), record(failure).to_json()).condition("Failed")


@pytest.mark.promise("Causes: A node, a device or an operator in trouble is named before the script is blamed")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("KernelDeadlock", "True"),  # node-problem-detector, GKE
        ("XidCriticalError", "True"),
        ("FilesystemCorruptionProblem", "True"),  # AKS
        ("UnhealthyNvidiaDevicePlugin", "True"),
        ("GPUMissing", "True"),
        ("XIDErrors", "True"),
        ("NVLinkStatusInactive", "True"),
        ("IBLinkFlapping", "True"),
        ("AcceleratedHardwareReady", "False"),  # EKS
        ("KernelReady", "False"),
        ("GpuMemWatch", "True"),  # NVSentinel
        ("SysLogsGPUFallenOff", "True"),
        ("GpuNvlinkError", "True"),
        ("NVSwitchFatalError", "True"),
        ("NVSwitchDown", "True"),
        ("DCGMError", "True"),
        ("NebiusGPUError", "True"),
    ],
)
def test_a_condition_of_the_node_explains_a_failure_of_its_gpu(kind: str, status: str) -> None:
    view = ended(CUDA).view(nodes={NODE: node(("Ready", "True"), (kind, status))})
    cause, end = find(view)
    assert (cause.code, end.code) == ("NodeFaulty", "ExceptionRaised")
    assert cause.sentence.startswith(f"{POD}: node {NODE} reports {kind} (Why: what happened); ")
    assert "CUDA error" in cause.sentence  # what it led to
    assert cause.evidence[0].where == f"node {NODE}: status.conditions[{kind}]"
    assert derive(view).code == ExitCode.INFRASTRUCTURE
    assert diagnose(view).others[0].why_not == "it is a consequence of the cause"


@pytest.mark.parametrize(
    ("conditions", "taint"),
    [
        ((("Ready", "True"), ("MemoryPressure", "False"), ("KernelDeadlock", "False"), ("KernelReady", "True")), ""),
        ((("SysLogsXIDError", "Unknown"), ("NetworkUnavailable", "False"), ("GpuPolicyReady", "False")), ""),
        ((), "nvidia.com/gpu"),
        ((), "team"),
    ],
)
def test_a_healthy_node_explains_nothing(conditions: tuple[tuple[str, str], ...], taint: str) -> None:
    view = ended(CUDA).view(nodes={NODE: node(*conditions, taint=taint)})
    assert [finding.code for finding in find(view)] == ["ExceptionRaised"]


@pytest.mark.parametrize("taint", ["AggregatedNodeHealth", "nvidia.com/gpu-xid-error", "gpu.health/memory-error"])
def test_a_taint_for_faults_explains_it_too(taint: str) -> None:
    cause = find(ended(CUDA).view(nodes={NODE: node(taint=taint)}))[0]
    assert (cause.code, cause.evidence[0].where) == ("NodeFaulty", f"node {NODE}: spec.taints")
    assert f"has the taint {taint}=true:NoSchedule" in cause.sentence


@pytest.mark.parametrize(
    "failure",
    [
        replace(CUDA, type="ValueError", message="sample 371 has no label"),
        replace(CUDA, message="CUDA error: device-side assert triggered"),
        replace(CUDA, type="torch.OutOfMemoryError", message="CUDA out of memory."),
        replace(CUDA, kind=Kind.EXIT, type="", message="", exit_code=17),
    ],
)
def test_a_mistake_of_the_script_is_no_fault_of_its_node(failure: Failure) -> None:
    view = ended(failure).view(nodes={NODE: node(("XidCriticalError", "True"))})
    assert "NodeFaulty" not in [finding.code for finding in find(view)]


def test_the_node_of_a_failure_is_read_if_it_may_be_at_fault() -> None:
    seen = ended(CUDA).seen()
    assert needs(JobView(seen)) == [Need(What.NODES, NODE)]
    assert needs(JobView(with_answer(seen, Need(What.NODES, NODE), Reply([node()])))) == []
    assert needs(ended(replace(CUDA, type="ValueError", message="no label")).view()) == []


@pytest.mark.parametrize("what", ["removed", "deleted", "silent", "replaced"])
def test_a_pod_that_has_just_lost_its_node_is_not_stuck_in_a_job_of_hours(what: str) -> None:
    """The pod says since when, or its controller replaces it."""
    lost = "2026-01-01T08:00:00Z"
    marked = [{"type": "Ready", "status": "False", "lastTransitionTime": lost}]
    marked.append({"type": "ContainersReady", "status": "True"})
    job = JobBuilder().all("pod").pod(1, node=NODE, conditions=marked if what == "silent" else [])
    if what == "deleted":
        job.pods[1]["metadata"]["deletionTimestamp"] = lost
    if what == "replaced":
        gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "lastTransitionTime": MADE}
        job.replaced_pods = {POD: {"metadata": {"name": POD}, "status": {"conditions": [gone]}}}
        del job.pods[1]
    view = job.view(missing=frozenset() if what == "silent" else frozenset({f"nodes/{NODE}"}))
    for seconds in (10, 1799, 1800):
        view.now = NOW - 60 + 8 * 3600 + seconds
        stuck = seconds == 1800 and what in ("deleted", "silent")
        assert [(found.code, found.is_stuck(view.now)) for found in find(view)] == [("NodeLost", stuck)]


@pytest.mark.parametrize(
    "taint",
    [
        "nvidia.com/gpu-xid-error: true",
        "node.cloudprovider.kubernetes.io/shutdown",
    ],
)
def test_nobody_is_told_to_tolerate_a_taint_for_faults(taint: str) -> None:
    text = f"0/3 nodes are available: 3 node(s) had untolerated taint(s) {{{taint}}}."
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    job = JobBuilder().pod(0).pod(2).pod(1, "Pending", {}, node="", conditions=[said])
    (found,) = find(job.view())
    assert found.code == "NodesNotReady"
    assert "toleration" not in found.remedy
