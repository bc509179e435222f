"""Jobs written by hand for Kubeflow's operators, on an image without flk: one script, and the loss it has here.

Nothing of flk's client takes part. The script and the runtime travel in a ConfigMap.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import zipfile
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

import flk_runtime
from flk.kube.client import ApiClient
from flk.kube.resources import RequestTarget
from flk.observe.resources import PODS
from tests.support.ranks import Ranks

SCRIPT = Path(__file__).parents[1] / "launchers" / "train.py"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# How the container starts, the processes that the job says it has, the launcher that a rank then sees.
WAYS: dict[str, tuple[list[str], int, str]] = {
    "torchrun": (["torchrun", "/code/train.py"], 1, "torchrun"),
    "python": (["python3", "/code/train.py"], 1, "trainer"),
}


@pytest.fixture(scope="session")
def loss(fork_server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The final loss of the script on this machine, alone."""
    (alone,) = Ranks(fork_server, tmp_path_factory.mktemp("alone"))(SCRIPT.read_text(), 1)
    return float(result(alone.output)["loss"])


def result(log: str) -> dict[str, Any]:
    lines = re.findall(r'\{"launcher": .*\}', log)
    assert len(lines) == 1, log
    return dict(json.loads(lines[0]))


def template(image: str, command: list[str], container: str) -> dict[str, Any]:
    environment = {"PYTHONPATH": "/code/flk_runtime.zip", "OMP_NUM_THREADS": "1", "USER": "test"}
    return {
        "metadata": {"labels": {"test": "launchers"}},
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": command,
                    "env": [{"name": name, "value": value} for name, value in environment.items()],
                    "resources": {"requests": {"cpu": "100m"}},
                    "securityContext": RESTRICTED,
                    "volumeMounts": [{"name": "code", "mountPath": "/code"}],
                }
            ],
            "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        },
    }


@functools.cache
def library() -> bytes:
    """flk's library as a zip that Python can import from."""
    folder = Path(flk_runtime.__path__[0])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder.parent))
    return buffer.getvalue()


def code() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "code"},
        "data": {"train.py": SCRIPT.read_text()},
        "binaryData": {"flk_runtime.zip": base64.b64encode(library()).decode()},
    }


def pytorchjob(image: str, command: list[str], processes: int) -> dict[str, Any]:
    replica = {"replicas": 1, "restartPolicy": "Never", "template": template(image, command, "pytorch")}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"nprocPerNode": str(processes), "pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
    }


def trainjob(image: str, command: list[str], processes: int) -> list[dict[str, Any]]:
    """A TrainJob and the runtime that it refers to: what an administrator and a user write."""
    pod = template(image, command, "node")
    pod["spec"]["restartPolicy"] = "Never"
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": pod},
        },
    }
    about = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    runtime = {"mlPolicy": {"numNodes": 2, "torch": {}}, "template": {"spec": {"replicatedJobs": [job]}}}
    labels = {"trainer.kubeflow.org/framework": "torch"}
    return [
        {**about, "kind": "TrainingRuntime", "metadata": {"name": "torch", "labels": labels}, "spec": runtime},
        {
            **about,
            "kind": "TrainJob",
            "metadata": {"name": "train"},
            "spec": {
                "runtimeRef": {"name": "torch", "kind": "TrainingRuntime"},
                "trainer": {"numNodes": 2, "numProcPerNode": processes},
            },
        },
    ]


def is_created(kubectl: Any, job: dict[str, Any]) -> bool:
    """Create a TrainJob; false if the webhook, which reads runtimes from a cache, does not have its runtime yet."""
    try:
        kubectl("create", "-f", "-", stdin=job)
    except AssertionError as error:
        if "trainingRuntime must be created before" not in str(error):
            raise
        return False
    return True


@pytest.fixture
def check(api: ApiClient, namespace: str, kubectl: Any, eventually: Any, loss: float) -> Callable[[int, str], None]:
    """Wait for the pods, and look at what their ranks have found: ``check(processes, launcher)``."""

    def ended() -> list[str]:
        pods, _ = api.list_all(RequestTarget(PODS, namespace), {"labelSelector": "test=launchers"})
        phases = [pod["status"].get("phase") for pod in pods]
        return phases if len(phases) == 2 and set(phases) <= {"Succeeded", "Failed"} else []

    def check(processes: int, launcher: str) -> None:
        phases = eventually("both pods end", ended)
        log = kubectl("logs", "-l", "test=launchers", "--tail=-1", "--prefix")
        assert phases == ["Succeeded"] * 2, log
        found = result(log)
        assert found["launcher"] == launcher
        assert found["world_size"] == 2 * processes
        assert found["ranks"] == [
            [node * processes + local, local, node, processes] for node in range(2) for local in range(processes)
        ]
        assert found["loss"] == pytest.approx(loss, abs=1e-6)

    return check


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
@pytest.mark.soak
def test_pytorchjob_with_master_and_worker(
    kubectl: Any, namespace: str, torch_image: str, check: Callable[[int, str], None]
) -> None:
    # The operator's own init container, which waits for the master's name, does not comply with `restricted`.
    kubectl("label", "namespace", namespace, "--overwrite", "pod-security.kubernetes.io/enforce=baseline")
    command, processes, launcher = WAYS["torchrun"]
    kubectl("create", "-f", "-", stdin=code())
    kubectl("create", "-f", "-", stdin=pytorchjob(torch_image, command, processes))
    check(processes, launcher)


@pytest.mark.promise("Jobs: flk.init works under flk, torchrun, Slurm, MPI, Horovod and Kubeflow's operators")
@pytest.mark.soak
def test_trainjob(
    trainer: None, kubectl: Any, torch_image: str, eventually: Any, check: Callable[[int, str], None]
) -> None:
    command, processes, launcher = WAYS["python"]
    runtime, job = trainjob(torch_image, command, processes)
    for manifest in (code(), runtime):
        kubectl("create", "-f", "-", stdin=manifest)
    eventually("the webhook finds the runtime", lambda: is_created(kubectl, job))
    check(processes, launcher)
