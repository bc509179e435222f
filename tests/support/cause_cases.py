"""The form of a cause that tests produce in a cluster, and the manifests of jobs that have one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flk_runtime.contract import ExitCode

Object = dict[str, Any]
SMALL = {"requests": {"cpu": "10m"}}
IDLE = "import time; time.sleep(3600)"


@dataclass(frozen=True)
class Expected:
    """The expected diagnosis: the code, and words of the sentence, of the evidence and of the remedy."""

    code: str
    sentence: str
    evidence: str
    remedy: str
    exit_code: int = ExitCode.INFRASTRUCTURE
    stuck: bool = True  # `flk wait` ends by itself; otherwise the cause may resolve, and flk keeps waiting


@dataclass(frozen=True)
class Case:
    """One job that does not run or fails, in one of the namespaces of the test."""

    name: str
    expected: Expected
    manifest: Object | None = None  # a PyTorchJob that flk has not made
    job: Object = field(default_factory=dict)  # fields of the job that flk makes
    script: str = IDLE
    namespace: str = "plain"
    pod: Object = field(default_factory=dict)  # fields of the spec of its pods
    sleeping: int | None = None  # index of the pod whose launcher does not start
    without_code: bool = False  # the ConfigMaps are not created
    event: tuple[str, str] | None = None  # reason and message of an event of its operator, which the test sends
    forgotten: bool = False  # events about it and its pods are deleted when it has failed, as after an hour
    lost: str = ""  # name of the pod that is deleted when the job runs
    nvml: str = ""  # what the stand-in for NVIDIA's library says of the GPU in its pod: lost or idle


def job(
    name: str,
    *,
    command: list[str] | None = None,
    image: str = "IMAGE",
    replicas: int = 1,
    policy: str = "Never",
    container: Object | None = None,
    pod: Object | None = None,
    run_policy: Object | None = None,
    labels: Object | None = None,
) -> Object:
    """A PyTorchJob as written without flk. Words in capitals stand for values of the test, such as IMAGE."""
    training = {
        "name": "pytorch",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command or ["python3", "-c", IDLE],
        "resources": SMALL,
        **(container or {}),
    }
    spec = {"containers": [training], "terminationGracePeriodSeconds": 1, **(pod or {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "nprocPerNode": "1",
            "runPolicy": {"cleanPodPolicy": "None", **(run_policy or {})},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": replicas,
                    "restartPolicy": policy,
                    "template": {"spec": spec},
                }
            },
        },
    }


def python(text: str) -> list[str]:
    """The command that runs some Python."""
    return ["python3", "-c", text]


def env_from(source: Object) -> Object:
    """A container with a variable from this source."""
    return {"env": [{"name": "TOKEN", "valueFrom": source}]}


def _volume(source: Object, **mount: Any) -> tuple[Object, Object]:
    """A volume of the pod and its mount in the container."""
    return (
        {"volumes": [{"name": "data", **source}]},
        {"volumeMounts": [{"name": "data", "mountPath": "/data", **mount}]},
    )


def with_volume(
    name: str, source: Object, command: list[str] | None = None, mount: Object | None = None, **how: Any
) -> Object:
    """A job whose pods have a volume at /data. ``how`` are further fields of their spec."""
    pod, container = _volume(source, **mount or {})
    return job(name, command=command, pod={**pod, **how}, container=container)
