"""Causes that come from outside while a job runs, and what `flk why` and `flk wait` say about each, in a real cluster.

One worker node offers a resource that only this test asks for. One more node exists only as an object, which reports
once that it is ready and then never again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import ExitCode
from tests.cluster.conftest import Cluster
from tests.support.cause_cases import IDLE
from tests.support.commands import WITHOUT_TORCH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(IDLE)
    return tmp_path


@pytest.fixture
def seat(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """A resource of which one node has one, and a priority class above that of all other pods."""
    run = uuid.uuid4().hex[:6]
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    node = next(node["metadata"]["name"] for node in nodes if not node["spec"].get("taints"))
    path = f"/status/capacity/flk.dev~1seat-{run}"
    patch = ["patch", "node", node, "--subresource=status", "--type=json", "-p"]
    urgent = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(urgent | {"metadata": {"name": f"flk-test-{run}"}}))
    try:
        cluster.kubectl(*patch, json.dumps([{"op": "add", "path": path, "value": "1"}]))
        yield f"flk.dev/seat-{run}", f"flk-test-{run}"
    finally:
        cluster.kubectl("delete", "priorityclass", f"flk-test-{run}", "--ignore-not-found")
        cluster.kubectl(*patch, json.dumps([{"op": "remove", "path": path}]))


@pytest.mark.promise("Causes: Preemption and deletion by others are named")
@pytest.mark.soak
def test_preempted_by_a_pod_of_higher_priority(
    flk: Any, kubectl: Any, image: str, folder: Path, seat: tuple[str, str], eventually: Any
) -> None:
    resource, urgent = seat
    common = ["--image", image, "--cpu", "10m", "--resource", f"{resource}=1", *WITHOUT_TORCH]
    assert flk("submit", "train.py", "--name", "patient", *common, cwd=folder).code == 0
    eventually("it runs", lambda: "Running" in flk("status", "patient").stdout)
    assert flk("submit", "train.py", "--name", "urgent", "--priority-class", urgent, *common, cwd=folder).code == 0

    answer = eventually("the cause is found", lambda: found(flk, "patient", "Preempted"))
    assert (
        answer["summary"] == "patient-worker-0 was preempted: the scheduler gave its place to a pod of higher priority"
    )
    assert any("reempt" in item["text"] for item in answer["cause"]["evidence"])
    assert "flk wait patient" in answer["cause"]["remedy"]
    assert flk("wait", "patient", "--timeout", "0").code == ExitCode.RUNNING
    assert flk("delete", "urgent").code == 0
    eventually("it runs again", lambda: "Running" in flk("status", "patient").stdout)


@pytest.fixture
def silent_node(cluster: Cluster) -> Iterator[str]:
    """A node that takes pods and reports once that it is ready."""
    name = f"flk-test-{uuid.uuid4().hex[:6]}"
    labels = {"kubernetes.io/hostname": name}  # without that of an operating system it gets no pod of a DaemonSet
    taint = {"key": "flk.dev/test", "value": "silent", "effect": "NoSchedule"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [taint]},
    }
    size = {"cpu": "4", "memory": "8Gi", "pods": "10"}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", **times}
    status = {"status": {"allocatable": size, "capacity": size, "conditions": [ready]}}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(node | {"spec": {"taints": [taint]}}))
    try:
        cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        yield name
    finally:
        cluster.kubectl("delete", "node", name, "--ignore-not-found")


@pytest.mark.promise("Causes: Preemption and deletion by others are named")
@pytest.mark.promise("Causes: A node, a device or an operator in trouble is named before the script is blamed")
def test_a_node_that_does_not_answer(
    flk: Any, kubectl: Any, image: str, folder: Path, silent_node: str, eventually: Any
) -> None:
    options = [
        "--image", image, "--cpu", "10m", "--replicas", "2",
        "--node-selector", f"kubernetes.io/hostname={silent_node}", "--toleration", "flk.dev/test=silent:NoSchedule",
    ]  # fmt: skip
    assert flk("submit", "train.py", "--name", "lost", *options, cwd=folder).code == 0
    pods = ["lost-worker-0", "lost-worker-1"]
    node = ["-o", "jsonpath={.spec.nodeName}"]
    for pod in pods:
        eventually(f"{pod} has a node", lambda pod=pod: kubectl("get", "pod", pod, "--ignore-not-found", *node))
        kubectl("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps(running()))
    answer = eventually("the cause is found", lambda: found(flk, "lost", "NodeLost"))
    assert answer["summary"] == f"lost-worker-0 and 1 other pod: node {silent_node} does not answer"
    words = ("NodeNotReady", "NodeStatusUnknown")  # the event of the pod, or the node's condition
    assert any(word in item["text"] for item in answer["cause"]["evidence"] for word in words)
    assert f"kubectl delete node {silent_node}" in answer["cause"]["remedy"]
    assert f"node {silent_node} does not answer" in flk("status", "lost").stdout
    assert flk("wait", "lost", "--timeout", "0").code == ExitCode.RUNNING
    kubectl("delete", "pod", *pods, "--force", "--grace-period=0")


def found(flk: Any, job: str, code: str) -> Any:
    """What `flk why` answers, if it is this code."""
    answer = json.loads(flk("why", job, "-o", "json").stdout or "{}")
    return answer if answer.get("code") == code else None


def running() -> dict[str, Any]:
    """The status of a pod that runs, as its node would report it."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": "",
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
    }
    ready = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("Ready", "ContainersReady")]
    container["state"] = {"running": {"startedAt": now}}
    return {"status": {"phase": "Running", "startTime": now, "conditions": ready, "containerStatuses": [container]}}
