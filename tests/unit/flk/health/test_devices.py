"""Faults that a node or the status of a pod reports: they are named before the code of the user is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flk.health import find
from flk.health.why import diagnose
from flk.jobs.state import Phase, derive
from flk.observe.needs import needs, with_answer
from flk.observe.observation import Need, What
from flk.observe.source import Reply
from flk.observe.view import JobView
from flk_runtime.contract.failure import ExitCode, Failure, Kind
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


def device(health: str, **more: str) -> dict[str, Any]:
    devices = [{"resourceID": "GPU-7", "health": "Healthy"}, {"resourceID": "GPU-8", "health": health, **more}]
    return {"allocatedResourcesStatus": [{"name": "nvidia.com/gpu", "resources": devices}]}


def with_device(job: JobBuilder, health: str, **more: str) -> JobBuilder:
    job.pods[1]["status"]["containerStatuses"][0] |= device(health, **more)
    return job


@pytest.mark.promise("Causes: A node, a device or an operator in trouble is named before the script is blamed")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("KernelDeadlock", "True"),  # node-problem-detector, GKE
        ("ReadonlyFilesystem", "True"),
        ("ReadOnlyRootFileSystem", "True"),
        ("XfsShutdown", "True"),
        ("CperHardwareErrorFatal", "True"),
        ("CorruptDockerOverlay2", "True"),
        ("FrequentKubeletRestart", "True"),
        ("FrequentDockerRestart", "True"),
        ("FrequentContainerdRestart", "True"),
        ("FrequentUnregisterNetDevice", "True"),
        ("KubeletUnhealthy", "True"),
        ("ContainerRuntimeUnhealthy", "True"),
        ("XidCriticalError", "True"),
        ("FilesystemCorruptionProblem", "True"),  # AKS
        ("KubeletProblem", "True"),
        ("ContainerRuntimeProblem", "True"),
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
    view = with_device(ended(failure), "Unhealthy").view(nodes={NODE: node(("XidCriticalError", "True"))})
    codes = [finding.code for finding in find(view)]
    assert codes[0] not in ("NodeFaulty", "DeviceUnhealthy")
    assert codes[1:] == ["DeviceUnhealthy"]  # it is told all the same: a GPU that computes nonsense raises anything


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.LOST, Kind.HANG, Kind.IO, Kind.UNKILLABLE])
def test_an_unhealthy_device_explains_an_end_without_an_exception(kind: Kind) -> None:
    view = with_device(ended(replace(CUDA, kind=kind, type="", message="")), "Unhealthy", message="Xid 79").view()
    assert find(view)[0].code == "DeviceUnhealthy"
    assert f"{POD}: device GPU-8 (nvidia.com/gpu) is unhealthy: Xid 79" in derive(view).message


def test_a_job_runs_on_while_a_device_is_unhealthy_and_says_so() -> None:
    job = JobBuilder().all("pod").condition("Running")
    job.record = record(None, outcome="running")
    state = derive(with_device(job, "Unhealthy").view())
    assert (state.phase, state.reason) == (Phase.RUNNING, "DeviceUnhealthy")
    assert find(with_device(job, "Unknown").view()) == []


def test_a_pod_that_left_a_tainted_device_was_not_on_a_lost_node() -> None:
    gone = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByDeviceTaintManager", "message": "taint"}
    found = find(JobBuilder().all("pod").pod(1, "Failed", {}, conditions=[gone]).view())
    assert found[0].code == "DeviceUnhealthy"


def test_the_node_of_a_failure_is_read_if_it_may_be_at_fault() -> None:
    seen = ended(CUDA).seen()
    assert needs(JobView(seen)) == [Need(What.NODES, NODE)]
    assert needs(JobView(with_answer(seen, Need(What.NODES, NODE), Reply([node()])))) == []
    assert needs(ended(replace(CUDA, type="ValueError", message="no label")).view()) == []


@pytest.mark.parametrize(
    "taint",
    [
        "AggregatedNodeHealth: False",
        "nvidia.com/gpu-xid-error: true",
        "karpenter.sh/disrupted",
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
