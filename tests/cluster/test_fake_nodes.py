"""What flk says of nodes with GPUs, and of what autoscalers, device monitors, Kueue and Volcano write, without these.

The cluster is the kind cluster FLK_TEST_FAKE_KIND (default `fake`), which is created if it does not exist. Its nodes
with GPUs are played by kwok, the scheduler and the training operator are real, and the tests write the events,
conditions and objects that the other controllers would write. The API server checks them as it checks the real ones. It
serves Kueue's and Volcano's kinds by the definitions in the folder FLK_TEST_DEFINITIONS; without it by others that have
the same names and take any fields.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest
import yaml

from flk_runtime.contract.failure import Failure, Kind
from tests.cluster.conftest import MAKE_CLUSTER, ROOT, Cluster, kind_kubeconfig
from tests.support.jobs import record
from tests.support.processes import checked, until
from tests.support.requirements import locked, unavailable

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900, func_only=True)]
GPU = "nvidia.com/gpu"
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
# How kwok plays: a node is ready, its pods run until they are deleted.
STAGES = """
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions:
    - {key: '.status.conditions.[] | select( .type == "Ready" ) | .status', operator: NotIn, values: ["True"]}
  next:
    statusTemplate: |
      conditions:
      {{ $now := Now }}
      {{ range NodeConditions }}
      - type: {{ .type | Quote }}
        status: {{ .status | Quote }}
        reason: {{ .reason | Quote }}
        message: {{ .message | Quote }}
        lastHeartbeatTime: {{ $now | Quote }}
        lastTransitionTime: {{ $now | Quote }}
      {{ end }}
      phase: Running
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-runs}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - {key: .status.phase, operator: In, values: [Pending]}
  next:
    statusTemplate: |
      {{ $now := Now }}
      conditions:
      - {type: Ready, status: "True", lastTransitionTime: {{ $now | Quote }}}
      containerStatuses:
      {{ range .spec.containers }}
      - image: {{ .image | Quote }}
        name: {{ .name | Quote }}
        ready: true
        restartCount: 0
        state: {running: {startedAt: {{ $now | Quote }}}}
      {{ end }}
      phase: Running
      startTime: {{ $now | Quote }}
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-goes}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: Exists}
  next: {delete: true}
"""
KINDS = {  # of controllers that are not there: plural names by group, version and kind
    ("kueue.x-k8s.io", "v1beta2", "LocalQueue"): "localqueues",
    ("kueue.x-k8s.io", "v1beta2", "Workload"): "workloads",
    ("scheduling.volcano.sh", "v1beta1", "PodGroup"): "podgroups",
}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no other test uses at the same time, with kwok and two nodes of 8 GPUs."""
    if not shutil.which("kwok"):
        unavailable("kwok, which plays nodes, is not installed")
    name = os.environ.get("FLK_TEST_FAKE_KIND", "fake")
    text = kind_kubeconfig(name)
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(text)
    result = Cluster(yaml.safe_load(text), path, name)
    with locked("fake"):
        if not result.kubectl("get", "crd", "pytorchjobs.kubeflow.org", "--ignore-not-found", "-o", "name"):
            checked([str(ROOT / "k8s" / "install-operator"), "--kubeconfig", str(path)], timeout=MAKE_CLUSTER)
        _define_kinds(result)
        apply(result, [node("fake-a"), node("fake-b")])
        stages = path.with_name("stages.yaml")
        stages.write_text(STAGES)
        play = ["kwok", "--kubeconfig", str(path), "--config", str(stages), "--manage-all-nodes=false"]
        play += ["--node-lease-duration-seconds=40"]
        play += ["--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake"]
        kwok = subprocess.Popen(play, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            result.kubectl("wait", "node", "-l", "type=kwok", "--for=condition=Ready", "--timeout=100s")
            yield result
        finally:
            result.kubectl("delete", "node", "-l", "type=kwok")
            kwok.terminate()
            kwok.wait(60)


def _define_kinds(cluster: Cluster) -> None:
    given = os.environ.get("FLK_TEST_DEFINITIONS")
    if given:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", given)
    items = []
    for (group, version, kind), plural in KINDS.items():
        if not cluster.kubectl("get", "crd", f"{plural}.{group}", "--ignore-not-found", "-o", "name"):
            schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
            items.append(
                {
                    "apiVersion": "apiextensions.k8s.io/v1",
                    "kind": "CustomResourceDefinition",
                    "metadata": {"name": f"{plural}.{group}"},
                    "spec": {
                        "group": group,
                        "names": names,
                        "scope": "Namespaced",
                        "versions": [{**served, "subresources": {"status": {}}}],
                    },
                }
            )
    if items:
        apply(cluster, items)
    crds = [f"crd/{plural}.{group}" for (group, _, _), plural in KINDS.items()]
    cluster.kubectl("wait", *crds, "--for=condition=Established", "--timeout=60s")


def apply(cluster: Cluster, items: list[dict[str, Any]]) -> None:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


def node(name: str, gpus: int = 8) -> dict[str, Any]:
    size = {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [TAINT]},
        "status": {"allocatable": size, "capacity": size},
    }


class World:
    """A namespace of the cluster, its jobs, and what controllers write there."""

    def __init__(self, flk: Any, kubectl: Any, cluster: Cluster, namespace: str) -> None:
        self.flk, self.kubectl, self.cluster, self.namespace = flk, kubectl, cluster, namespace

    def job(self, gpus: int, **fields: Any) -> str:
        """Write the file of a job whose pods have so many GPUs on the fake nodes, and return its name."""
        nodes = {"selector": {"type": "kwok"}, "tolerations": ["kwok.x-k8s.io/node=fake:NoSchedule"]}
        resources = {"cpu": "1", "gpu": gpus}
        job = {"command": "x.py", "ship": False, "image": "none:1", "nodes": nodes, "resources": resources, **fields}
        (self.flk.folder / "flk.yaml").write_text(yaml.safe_dump(job))
        return "flk.yaml"

    def submit(self, name: str, gpus: int, **fields: Any) -> None:
        submitted = self.flk("submit", "--file", self.job(gpus, **fields), "--name", name)
        assert submitted.code == 0, submitted.stderr

    def check(self, gpus: int, **fields: Any) -> tuple[int, str]:
        """The exit code of `flk submit --dry-run`, and what it and `flk doctor` say of the capacity and the queue."""
        file = self.job(gpus, **fields)
        checked = self.flk("submit", "--dry-run", "--file", file, "--name", "checked")
        found = json.loads(self.flk("doctor", "-o", "json").stdout)["checks"]
        said = [each["found"] for each in found if each["check"] in ("gpus", "capacity", "queue", "gang")]
        for each in found:
            if each["check"] in ("capacity", "queue") and each["level"] in ("failed", "warning"):
                assert f"check {each['level']}: {each['check']}: {each['found']}" in checked.stderr
        return checked.code, "\n".join(said)

    def why(self, name: str, code: str) -> dict[str, Any]:
        """The answer of `flk why` when it has found this cause."""

        def found() -> Any:
            answer = json.loads(self.flk("why", name, "-o", "json").stdout or "{}")
            return answer if answer.get("code") == code else None

        def told() -> str:
            return str(self.flk("why", name).stdout) + str(self.kubectl("get", "events"))

        return until(found, f"{name} is {code}", seconds=200, every=1, context=told)  # type: ignore[no-any-return]

    def status(self, name: str) -> dict[str, Any]:
        return json.loads(self.flk("status", name, "-o", "json").stdout)  # type: ignore[no-any-return]

    def event(self, pod: str, reason: str, message: str, who: str, *, new: bool = False) -> None:
        """Send an event about a pod as an autoscaler does: in the older form, or in that of events.k8s.io."""
        about = {"apiVersion": "v1", "kind": "Pod", "name": pod, "namespace": self.namespace}
        about["uid"] = self.kubectl("get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
        now = datetime.now(timezone.utc)
        kind = "Warning" if reason.startswith("Failed") else "Normal"
        event: dict[str, Any] = {
            "kind": "Event",
            "metadata": {"generateName": f"{pod}-"},
            "reason": reason,
            "type": kind,
        }
        if new:
            event |= {"apiVersion": "events.k8s.io/v1", "regarding": about, "note": message, "action": "None"}
            event |= {"reportingController": who, "reportingInstance": f"{who}-0"}
            event["eventTime"] = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        else:
            event |= {"apiVersion": "v1", "involvedObject": about, "message": message, "source": {"component": who}}
            event |= dict.fromkeys(("firstTimestamp", "lastTimestamp"), now.strftime("%Y-%m-%dT%H:%M:%SZ")) | {
                "count": 1
            }
        self.kubectl("create", "-f", "-", stdin=event)

    def set_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        patch = json.dumps({"status": status})
        how = ["--type=strategic" if kind in ("node", "pod") else "--type=merge", "--subresource=status"]
        self.kubectl("patch", kind, name, *how, "-p", patch)


@pytest.fixture
def world(flk: Any, kubectl: Any, cluster: Cluster, namespace: str) -> World:
    return World(flk, kubectl, cluster, namespace)


def test_gpus_that_no_node_has_and_nodes_that_are_cordoned(world: World, eventually: Any) -> None:
    # The pods of the test before may still be going.
    eventually("all GPUs are free", lambda: "16 nvidia.com/gpu, 16 free" in world.check(8, replicas=2)[1])
    assert world.check(8, replicas=2)[0] == 0
    code, said = world.check(16)
    assert code == 104
    assert "2 nodes could hold 0 pods of 1 cpu, 16 nvidia.com/gpu if they were empty, and the job has 1" in said
    world.submit("large", 16, stuck_after="5s")
    answer = world.why("large", "NotEnoughGpus")
    assert "no node has 16 nvidia.com/gpu at all; the largest node, fake-" in answer["summary"], answer
    assert "has 8" in answer["summary"]
    eventually("it is stuck", lambda: world.status("large")["phase"] == "Stuck")

    world.submit("busy", 8)
    eventually("it runs", lambda: world.status("busy")["phase"] == "Running")
    code, said = world.check(8, replicas=2)
    assert (code, "1 pods of 1 cpu, 8 nvidia.com/gpu fit now, and the job has 2" in said) == (0, True), said

    for name in ("fake-a", "fake-b"):
        world.cluster.kubectl("cordon", name)
    try:
        code, said = world.check(1)
        assert (code, "no node accepts the job's pods: it is cordoned" in said) == (104, True), said
        world.submit("kept", 1)
        answer = world.why("kept", "NodesNotReady")
        assert "are not ready or take no pods (node(s) were unschedulable)" in answer["summary"], answer
        assert world.status("busy")["phase"] == "Running"
    finally:
        for name in ("fake-a", "fake-b"):
            world.cluster.kubectl("uncordon", name)
    eventually("it runs when the nodes are back", lambda: world.status("kept")["phase"] == "Running")


@pytest.mark.parametrize(
    ("reason", "message", "who", "new", "code", "phase", "said"),
    [
        (
            "TriggeredScaleUp",
            "pod triggered scale-up: [{gpu-pool 0->1 (max: 3)}]",
            "cluster-autoscaler",
            False,
            "NodeBeingAdded",
            "Pending",
            "no node can take it yet, and cluster-autoscaler adds one ([{gpu-pool 0->1 (max: 3)}])",
        ),
        (
            "Nominated",
            "Pod should schedule on: nodeclaim/gpu-x7k2p",
            "karpenter",
            True,
            "NodeBeingAdded",
            "Pending",
            "no node can take it yet, and karpenter adds one (Pod should schedule on: nodeclaim/gpu-x7k2p)",
        ),
        (
            "NotTriggerScaleUp",
            "pod didn't trigger scale-up: 1 max node group size reached",
            "cluster-autoscaler",
            False,
            "NodeNotAddedNow",
            "Pending",
            "no node can take it, and cluster-autoscaler can add none now (1 max node group size reached)",
        ),
        (
            "NotTriggerScaleUp",
            "pod didn't trigger scale-up: 2 Insufficient nvidia.com/gpu",
            "cluster-autoscaler",
            False,
            "NotEnoughGpus",
            "Stuck",
            "no node has 16 nvidia.com/gpu at all",
        ),
        (
            "FailedScheduling",
            'Failed to schedule pod, incompatible with nodepool "default", no instance type satisfied resources',
            "karpenter",
            True,
            "NotEnoughGpus",
            "Stuck",
            "no node has 16 nvidia.com/gpu at all",
        ),
    ],
)
def test_what_an_autoscaler_says_of_a_pod(
    world: World, eventually: Any, reason: str, message: str, who: str, new: bool, code: str, phase: str, said: str
) -> None:
    world.submit("gpt", 16, **({"stuck_after": "5s"} if phase == "Stuck" else {}))
    eventually("the scheduler has looked at it", lambda: "NotEnoughGpus" in world.flk("status", "gpt").stdout)
    world.event("gpt-worker-0", reason, message, who, new=new)

    def told() -> Any:
        answer = json.loads(world.flk("why", "gpt", "-o", "json").stdout)
        return message in json.dumps(answer["cause"], ensure_ascii=False).replace('\\"', '"') and answer

    answer = eventually("why has read the event", told)
    assert (answer["code"], said in answer["summary"]) == (code, True), answer
    eventually(f"it is {phase}", lambda: world.status("gpt")["phase"] == phase)
    listed = json.loads(world.flk("list", "-o", "json").stdout)["items"][0]
    assert (listed["phase"], listed["reason"]) == (phase, code)


def test_before_a_job_an_autoscaler_may_add_a_node(world: World) -> None:
    status = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cluster-autoscaler-status"}}
    status["metadata"] = {"name": "cluster-autoscaler-status", "namespace": "kube-system"}
    apply(world.cluster, [status])
    try:
        code, said = world.check(16)
        assert code == 0
        assert "and the job has 1: no node now; an autoscaler may add one (cluster-autoscaler)" in said
    finally:
        world.cluster.kubectl("-n", "kube-system", "delete", "configmap", "cluster-autoscaler-status")
    apply(world.cluster, [{**node("cloud"), "spec": {"providerID": "aws:///eu-west-1a/i-1", "taints": [TAINT]}}])
    try:
        assert "no node now; an autoscaler may add one (AWS)" in world.check(16)[1]
    finally:
        world.cluster.kubectl("delete", "node", "cloud")


def test_a_node_and_a_device_that_report_a_fault(world: World, eventually: Any) -> None:
    names = ("node-fault", "device-fault")
    for name in names:
        world.submit(name, 1, restarts=0)
        eventually(f"{name} runs", lambda name=name: world.status(name)["phase"] == "Running")
    host = world.kubectl("get", "pod", "node-fault-worker-0", "-o", "jsonpath={.spec.nodeName}")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "XidCriticalError",
        "status": "True",
        "reason": "Xid79",
        "message": "GPU has fallen off the bus",
    }
    times = {"lastTransitionTime": now, "lastHeartbeatTime": now}
    ended = {"exitCode": 104, "reason": "Error", "startedAt": now, "finishedAt": now}
    container = {"name": "pytorch", "image": "none:1", "imageID": "", "ready": False, "restartCount": 0}

    def launcher_ends(name: str, **status: Any) -> None:
        """What the kubelet writes when the launcher of a pod has ended because its GPU failed."""
        pod = f"{name}-worker-0"
        failure = Failure(Kind.GPU, 0, 0, pod, host, 0, time.time(), "RuntimeError", "CUDA error: unknown error")
        container["state"] = {"terminated": {**ended, "message": record(failure).to_json()}}
        world.set_status("pod", pod, {"phase": "Failed", "containerStatuses": [container], **status})

    world.set_status("node", host, {"conditions": [{**condition, **times}]})
    launcher_ends("node-fault")
    answer = world.why("node-fault", "NodeFaulty")
    assert f"node {host} reports XidCriticalError (Xid79: GPU has fallen off the bus)" in answer["summary"]
    assert f"cordon {host}" in answer["cause"]["remedy"]
    assert world.status("node-fault")["code"] == 104
    world.set_status("node", host, {"conditions": [{**condition, **times, "status": "False"}]})

    # A device that the kubelet calls unhealthy is left out: the API server drops it where ResourceHealthStatus is off.
    left = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByDeviceTaintManager"}
    left |= {"message": "Device Taint manager: deleting due to NoExecute taint", "lastTransitionTime": now}
    launcher_ends("device-fault", conditions=[left])
    answer = world.why("device-fault", "DeviceUnhealthy")
    assert "device-fault-worker-0 had to leave a device that is tainted: Device Taint manager" in answer["summary"]


def test_a_job_in_a_queue_of_kueue(world: World, eventually: Any) -> None:
    assert "there is no queue gold" in world.check(1, queue="gold")[1]
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": "gold"}}
    world.kubectl("create", "-f", "-", stdin={**queue, "spec": {"clusterQueue": "all"}})
    code, said = world.check(1, queue="gold")
    assert (code, "queue gold exists; 0 jobs wait in it" in said) == (0, True), said
    inactive = {"type": "Active", "status": "False", "reason": "ClusterQueueIsInactive"}
    inactive |= {"message": "Can't submit new workloads to clusterQueue", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    world.set_status("localqueue", "gold", {"conditions": [inactive]})
    code, said = world.check(1, queue="gold")
    assert (code, "queue gold admits no jobs now: Can't submit new workloads" in said) == (104, True), said

    world.submit("queued", 1, queue="gold")
    answer = world.why("queued", "WaitingInQueue")
    assert "it waits in queue gold; Kueue has no Workload for it yet" in answer["summary"]
    uid = world.kubectl("get", "pytorchjob", "queued", "-o", "jsonpath={.metadata.uid}")
    container = {"name": "pytorch", "image": "none:1", "resources": {"requests": {"cpu": "1"}}}
    pods = {"name": "worker", "count": 1, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload"}
    workload["metadata"] = {"name": "pytorchjob-queued-1", "labels": {"kueue.x-k8s.io/job-uid": uid}}
    workload["spec"] = {"queueName": "gold", "podSets": [pods], "active": True}
    assert "--target job" in world.why("queued", "QueueIgnoresJobs")["cause"]["remedy"]
    assert world.flk("wait", "queued").code == 104
    world.kubectl("create", "-f", "-", stdin=workload)

    def says(kind: str, status: str, reason: str, message: str) -> None:
        said = {"type": kind, "status": status, "reason": reason, "message": message}
        said["lastTransitionTime"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        world.set_status("workload", "pytorchjob-queued-1", {"conditions": [said]})

    short = "couldn't assign flavors to pod set worker: insufficient unused quota for nvidia.com/gpu in flavor h100"
    says("QuotaReserved", "False", "Pending", short)
    eventually("why has read it", lambda: f"it waits in queue gold: {short}" in world.flk("why", "queued").stdout)
    assert "WaitingInQueue" in world.flk("status", "queued").stdout
    says("Evicted", "True", "Preempted", "Preempted to accommodate a workload of higher priority")
    assert "Preempted to accommodate" in world.why("queued", "PreemptedByQueue")["summary"]
    world.kubectl("patch", "workload", "pytorchjob-queued-1", "--type", "merge", "-p", '{"spec": {"active": false}}')
    says("Evicted", "True", "Deactivated", "The workload is deactivated")
    answer = world.why("queued", "WorkloadDeactivated")
    assert "queue gold does not start it (Deactivated)" in answer["summary"]
    (command, _) = answer["cause"]["remedy"].split(" has the queue")
    world.kubectl(*shlex.split(command)[1:])
    world.why("queued", "PreemptedByQueue")


def test_a_gang_of_volcano_that_does_not_fit(world: World, eventually: Any) -> None:
    assert (
        "the cluster serves PodGroups (scheduling.volcano.sh/v1beta1)" in world.check(8, replicas=3, gang="volcano")[1]
    )
    world.submit("gang", 8, replicas=3, gang="volcano")
    said = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources"}
    said["message"] = "3/3 tasks in gang unschedulable: pod group is not ready, 3 Pending, 3 minAvailable"
    said |= {"lastTransitionTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "transitionID": "1"}
    eventually("the group is there", lambda: "gang" in world.kubectl("get", "podgroups", "-o", "name"))
    world.set_status("podgroup", "gang", {"phase": "Pending", "conditions": [said]})
    answer = world.why("gang", "WaitingForGang")
    assert "the scheduler starts 3 pods together or none" in answer["summary"]
    assert said["message"] in json.dumps(answer["cause"])
