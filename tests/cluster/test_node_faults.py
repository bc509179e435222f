"""Faults of nodes and of the control plane, in a cluster of their own, whose nodes and API server these tests stop.

The cluster is the kind cluster FLK_TEST_CHAOS_KIND (default `chaos`), which is created if it does not exist. Every test
starts again what it has stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import MAKE_CLUSTER, ROOT, Cluster, kind_kubeconfig, loaded
from tests.support.preemption import TRAIN
from tests.support.processes import checked
from tests.support.requirements import locked

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
# The pods are on two nodes, so that a launcher remains that knows of the attempts.
SPREAD = {
    "spec": {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"flk.dev/job": "train"}},
            }
        ]
    }
}
NODE_TIMEOUT = 60  # seconds after the node controller has noticed the fault in which status says so


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no other test uses at the same time."""
    name = os.environ.get("FLK_TEST_CHAOS_KIND", "chaos")
    text = kind_kubeconfig(name)
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(text)
    result = Cluster(yaml.safe_load(text), path, name)
    with locked("chaos"):
        if not result.kubectl("get", "crd", "pytorchjobs.kubeflow.org", "--ignore-not-found", "-o", "name"):
            checked([str(ROOT / "k8s" / "install-operator"), "--kubeconfig", str(path)], timeout=MAKE_CLUSTER)
        _move_operator_to_control_plane(result)
        yield result


def _move_operator_to_control_plane(cluster: Cluster) -> None:
    """The tests stop workers, and only the operator can replace the pods of a worker that is stopped."""
    plane = "node-role.kubernetes.io/control-plane"
    pod = {"nodeSelector": {plane: ""}, "tolerations": [{"key": plane, "operator": "Exists", "effect": "NoSchedule"}]}
    patch = json.dumps({"spec": {"template": {"spec": pod}}})
    cluster.kubectl("-n", "kubeflow", "patch", "deployment", "training-operator", "--patch", patch)
    cluster.kubectl("-n", "kubeflow", "rollout", "status", "deployment", "training-operator", timeout=180)


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    return loaded("cpu", request, cluster)


class Training:
    """A job of three pods that saves into the first one, and what is seen of it."""

    def __init__(self, flk: Any, kubectl: Any, image: str, folder: Path, steps: int) -> None:
        self.flk, self.kubectl = flk, kubectl
        (folder / "train.py").write_text(textwrap.dedent(TRAIN))
        (folder / "spread.yaml").write_text(yaml.safe_dump(SPREAD))
        options = ["--name", "train", "--replicas", "3", "--cpu", "100m", "--image", image, "--save-every", "20"]
        options += ["--patch", "spread.yaml"]
        submitted = flk("submit", "train.py", *options, "--", str(steps), "0.1", "0", cwd=folder)
        assert submitted.code == 0, submitted.stderr

    def step(self) -> int:
        steps = re.findall(r'"step": (\d+),', self.kubectl("logs", "train-worker-0"))
        return int(steps[-1]) if steps else 0

    def status(self) -> dict[str, Any]:
        shown = self.flk("status", "train", "-o", "json")
        assert shown.stdout, shown.stderr
        state: dict[str, Any] = json.loads(shown.stdout)
        assert state["phase"] != "Failed", state
        return state

    def trains(self, attempt: int) -> bool:
        """Whether the attempt has printed a step of its own."""
        if len(self.status()["attempts"]) < attempt:
            return False
        return '"step": ' in self.kubectl("logs", "train-worker-0").rpartition(f"flk-attempt {attempt}\n")[2]

    def node(self, pod: int) -> str:
        return str(self.kubectl("get", "pod", f"train-worker-{pod}", "-o", "jsonpath={.spec.nodeName}"))

    def uid(self, pod: int) -> str:
        path = "jsonpath={.metadata.uid}"
        return str(self.kubectl("get", "pod", f"train-worker-{pod}", "--ignore-not-found", "-o", path))


@contextlib.contextmanager
def paused(node: str) -> Iterator[None]:
    """Stop all processes of a node, as when its network and its power are gone."""
    checked(["docker", "pause", node])
    try:
        yield
    finally:
        checked(["docker", "unpause", node])


@pytest.mark.parametrize("pod", [1, 0])
def test_a_node_that_is_gone_is_named_and_the_job_goes_on_without_it(
    flk: Any, kubectl: Any, image: str, cluster: Cluster, eventually: Any, tmp_path: Path, pod: int
) -> None:
    job = Training(flk, kubectl, image, tmp_path, 3000)
    eventually("the job trains", lambda: job.trains(1))
    node, uid = job.node(pod), job.uid(pod)
    wait = flk.start("wait", "train", "--timeout", "20m")
    with paused(node):
        ready = ["get", "node", node, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}"]
        eventually("the node controller notices it", lambda: cluster.kubectl(*ready) != "True")
        noticed = time.monotonic()
        eventually("status names the node", lambda: f"node {node} does not answer" in flk("status", "train").stdout)
        assert time.monotonic() - noticed < NODE_TIMEOUT
        shown = flk("status", "train").stdout + flk("why", "train").stdout
        assert f"kubectl delete node {node}" in shown
        lost = [p for p in range(3) if job.node(p) == node]
        for each in lost:
            kubectl("delete", "pod", f"train-worker-{each}", "--force", "--grace-period=0")
        eventually("the pod is replaced", lambda: job.uid(pod) not in ("", uid) and job.node(pod) != node)
        eventually("the job trains without the node", lambda: job.trains(2))
        attempts = job.status()["attempts"]
        assert [each["number"] for each in attempts] == list(range(1, len(attempts) + 1))
    steps = job.step()
    eventually("the job still trains when the node is back", lambda: job.step() > steps + 5)
    assert len(job.status()["attempts"]) == len(attempts)
    wait.terminate()
    assert f"node {node} does not answer" in wait.communicate(timeout=60)[1]


def test_a_job_goes_on_without_api_server_and_operator(
    flk: Any, kubectl: Any, image: str, cluster: Cluster, eventually: Any, tmp_path: Path
) -> None:
    job = Training(flk, kubectl, image, tmp_path, 1200)
    eventually("the job trains", lambda: job.trains(1))
    cluster.kubectl("-n", "kubeflow", "delete", "pod", "-l", "control-plane=kubeflow-training-operator")
    wait = flk.start("wait", "train")
    assert "is running" in wait.stderr.readline()  # it has read the job once
    plane = f"{cluster.kind}-control-plane"
    manifests = "/etc/kubernetes/manifests/kube-apiserver.yaml"
    checked(["docker", "exec", plane, "mv", manifests, "/root/kube-apiserver.yaml"])
    try:
        time.sleep(75)  # the kubelet needs some of it to stop the API server
        assert subprocess.run(
            ["kubectl", "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", "/readyz", "--request-timeout=5s"],
            capture_output=True,
        ).returncode
    finally:
        checked(["docker", "exec", plane, "mv", "/root/kube-apiserver.yaml", manifests])
    output = wait.communicate(timeout=900)[1]
    assert wait.returncode == 0, output
    assert [each["outcome"] for each in json.loads(flk("status", "train", "-o", "json").stdout)["attempts"]] == [
        "succeeded"
    ]
