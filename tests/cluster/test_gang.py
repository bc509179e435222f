"""Gang scheduling: two jobs deadlock without it, and do not with that of Kubernetes 1.36.

The latter is an alpha feature: these tests make a kind cluster for it, and delete it.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Flk, Kubectl
from tests.support.processes import checked
from tests.support.requirements import locked, unavailable

NODE = "kindest/node:v1.36.3"
IMAGE = "busybox:1.35"
CONFIG = """
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
featureGates: {GenericWorkload: true, GangScheduling: true}
runtimeConfig: {scheduling.k8s.io/v1alpha2: "true"}
kubeadmConfigPatches:
- |
  kind: KubeletConfiguration
  failCgroupV1: false
- |
  kind: InitConfiguration
  timeouts: {kubernetesAPICall: 8m0s, controlPlaneComponentHealthCheck: 8m0s}
nodes: [{role: control-plane}]
"""
SEATS = 10
BLOCKED = 2


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of the cluster flk-gang, which is made and deleted here unless it exists already."""
    if subprocess.run(["docker", "image", "inspect", NODE], capture_output=True).returncode:
        unavailable(f"there is no image {NODE}")
    path = tmp_path_factory.mktemp("gang") / "kubeconfig"
    name = ["--name", "flk-gang"]
    with locked("gang"):
        if "flk-gang" in checked(["kind", "get", "clusters"]).split():
            path.write_text(checked(["kind", "get", "kubeconfig", *name]))
            yield path
            return
        try:
            create = ["kind", "create", "cluster", *name, "--image", NODE, "--kubeconfig", str(path), "--wait", "120s"]
            checked([*create, "--config", "-"], stdin=CONFIG, timeout=900)
            checked(["kind", "load", "docker-image", *name, IMAGE], timeout=300)
            yield path
        finally:
            checked(["kind", "delete", "cluster", *name, "--kubeconfig", str(path)], timeout=120)


@pytest.fixture
def cluster_of_one(gang: Path, tmp_path: Path) -> Iterator[tuple[Flk, Kubectl]]:
    """flk and kubectl for that cluster."""
    command = Flk(tmp_path, kubeconfig=gang, home=tmp_path / "home")
    yield command, Kubectl(gang)
    command.close()


class Hall:
    """A node with ten seats, a resource that only the pods of this test request, and the jobs that want them."""

    def __init__(self, flk: Flk, kubectl: Kubectl, image: str) -> None:
        self.flk, self.kubectl, self.image = flk, kubectl, image
        self.resource = f"example.com/seat-{uuid.uuid4().hex[:6]}"
        nodes = kubectl.json("get", "nodes")["items"]
        self.node = next(node["metadata"]["name"] for node in nodes if not node["spec"].get("taints"))

    def change(self, operation: str) -> None:
        """Add the seats to what the node offers, or remove them."""
        key = self.resource.replace("/", "~1")
        fields = [f"/status/{field}/{key}" for field in ("capacity", "allocatable")]
        patch = [{"op": operation, "path": path, "value": str(SEATS)} for path in fields]
        self.kubectl("patch", "node", self.node, "--subresource=status", "--type=json", "-p", json.dumps(patch))

    def submit(self, name: str, pods: int, seats: int, gang: str, seconds: int) -> None:
        """Submit a job whose pods have these seats each and sleep."""
        sleep = {"name": "pytorch", "command": ["sh", "-c", f"sleep {seconds} & wait"]}
        job = {
            "command": "x.py",
            "ship": False,
            "image": self.image,
            "replicas": pods,
            "target": "job",
            "gang": gang,
            "resources": {"cpu": "10m", "extended": {self.resource: seats}},
            "patch": {"spec": {"containers": [sleep]}},
        }
        (self.flk.folder / f"{name}.yaml").write_text(json.dumps(job))
        submitted = self.flk("submit", "--file", f"{name}.yaml", "--name", name)
        assert submitted.code == 0, submitted.stderr

    def block(self) -> None:
        """Start a pod that has two of the seats."""
        rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        container = {
            "name": "main",
            "image": self.image,
            "command": ["sh", "-c", "sleep 1000 & wait"],
            "resources": {"limits": {self.resource: str(BLOCKED)}},
            "securityContext": rights,
        }
        user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {"containers": [container], "securityContext": user, "terminationGracePeriodSeconds": 0}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "blocker"}, "spec": spec}
        self.kubectl("create", "-f", "-", stdin=pod)
        self.kubectl("wait", "pod/blocker", "--for=condition=PodScheduled", "--timeout=60s")

    def placed(self, name: str) -> int:
        """How many pods of a job have a node."""
        pods = self.kubectl.json("get", "pods", "-l", f"flk.dev/job={name}")["items"]
        return sum("nodeName" in pod["spec"] for pod in pods)

    def why(self, name: str) -> str:
        return str(self.flk("why", name).stdout)

    def completed(self, name: str) -> bool:
        return "Complete" in self.kubectl("get", "job", name, "-o", "jsonpath={.status.conditions[*].type}")


@contextmanager
def hall(flk: Flk, kubectl: Kubectl, image: str) -> Iterator[Hall]:
    """The hall, whose seats are removed from the node at the end."""
    made = Hall(flk, kubectl, image)
    made.change("add")
    try:
        yield made
    finally:
        made.change("remove")


@pytest.mark.promise("Clusters: A gang gets nodes for all of its pods, or takes none")
@pytest.mark.soak
@pytest.mark.timeout(1200, func_only=True)
def test_a_gang_that_does_not_fit_takes_no_node(cluster_of_one: tuple[Flk, Kubectl], eventually: Any) -> None:
    with hall(*cluster_of_one, IMAGE) as seats:
        seats.submit("large", 4, 3, "native", 5)  # three of its pods fit
        eventually("why says what is missing", lambda: f"Insufficient {seats.resource}" in seats.why("large"))
        assert seats.why("large").startswith("WaitingForGang: the scheduler starts 4 pods together or none")
        assert seats.placed("large") == 0
        assert seats.flk("delete", "large").code == 0


@pytest.mark.soak
@pytest.mark.timeout(1200, func_only=True)
def test_two_gangs_at_once_do_not_deadlock(cluster_of_one: tuple[Flk, Kubectl], eventually: Any) -> None:
    """Two that come together, and the two that deadlock without a gang."""
    with hall(*cluster_of_one, IMAGE) as seats:
        for name in ("one", "two"):
            seats.submit(name, 3, 3, "auto", 5)
        for name in ("one", "two"):
            eventually(f"{name} ends", lambda name=name: seats.completed(name))
        seats.block()
        seats.submit("first", 2, 5, "native", 5)
        seats.submit("second", 2, 3, "native", 5)
        eventually("the second ends", lambda: seats.completed("second"))
        assert seats.placed("first") == 0
        seats.kubectl("delete", "pod", "blocker")
        eventually("the first ends", lambda: seats.completed("first"))
        for name in ("one", "two", "first", "second"):
            assert seats.flk("delete", name).code == 0
