"""From a job to the manifests that run it: a pure function, so what is shown is what is submitted.

A PyTorchJob of workers only, and the ConfigMaps that carry its code. Nothing is left to a default that the operator, a
cluster or a version may choose otherwise.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

from flk import labels
from flk.errors import UsageError
from flk.manifest.bundle import Shipment
from flk.manifest.environment import environment
from flk.spec.fabric import fabrics
from flk.spec.job import Job
from flk_runtime import contract

CHUNK: Final = 900_000  # bytes of a ConfigMap's data; the API server takes 1 MiB
USER: Final = 10001  # no user of any image; numeric, so that runAsNonRoot can be checked
GRACE: Final = 30  # seconds from SIGTERM to SIGKILL
_SHM: Final = "/dev/shm"  # noqa: S108 - no temporary file; the 64 MiB that it has by default stop NCCL
_LARGEST_INT: Final = 2**31 - 1


def render(
    job: Job, shipment: Shipment, *, namespace: str | None = None, submission: str = "", owner: str = ""
) -> list[dict[str, Any]]:
    """The PyTorchJob of ``job``, which has a name, and its ConfigMaps. Equal arguments give equal manifests."""
    if job.name is None:
        raise ValueError("the job has no name yet")
    own_labels = {**labels.MANAGED_BY, labels.JOB: job.name}
    place = {"namespace": namespace} if namespace else {}
    configs: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{job.name}-code-{number}", **place, "labels": dict(own_labels)},
            "immutable": True,
            "binaryData": data,
        }
        for number, data in enumerate(_parts(shipment))
    ]
    template = _pod_template(job, shipment, [config["metadata"]["name"] for config in configs])
    if job.patch:
        template = patched(template, job.patch)
        containers = template.get("spec", {}).get("containers", [])
        if not any(isinstance(c, dict) and c.get("name") == contract.CONTAINER for c in containers):
            raise UsageError(f"patch: leaves no container named {contract.CONTAINER}, which the operator looks for")
    annotations = {
        labels.VERSION: contract.VERSION,
        labels.SPEC: job.model_dump_json(exclude_none=True),
        **({labels.CODE_HASH: shipment.sha256} if shipment.code is not None else {}),
        **({labels.SUBMISSION: submission} if submission else {}),
        **({labels.OWNER: owner} if owner else {}),
    }
    manifest = {
        "apiVersion": labels.KUBEFLOW_API_VERSION,
        "kind": "PyTorchJob",
        "metadata": {
            "name": job.name,
            **place,
            "labels": {**own_labels, **({labels.QUEUE: job.queue} if job.queue else {})},
            "annotations": annotations,
        },
        "spec": {
            "nprocPerNode": str(job.processes_per_pod),
            "runPolicy": {
                "cleanPodPolicy": "None",
                # flk counts attempts itself. The operator's own count must not end a job earlier; zero would, at the
                # first pod that it starts anew.
                "backoffLimit": min(_LARGEST_INT, (job.restarts + 1) * job.replicas),
                **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
                **({"suspend": True} if job.queue else {}),  # Kueue lets it start
            },
            "pytorchReplicaSpecs": {
                "Worker": {"replicas": job.replicas, "restartPolicy": "ExitCode", "template": template}
            },
        },
    }
    return [manifest, *configs]


def patched(base: Any, patch: Any, path: str = "patch") -> Any:
    """``base`` with ``patch`` laid over it, as strategic merge patches do. UsageError where their shapes differ.

    Mappings are merged and null removes a key. Lists whose items have names (containers, env, volumes, ports) are
    merged by name, mounts by path; other lists are replaced.
    """
    for shape, name in ((dict, "a mapping"), (list, "a list")):
        if isinstance(base, shape) and base and not isinstance(patch, shape):
            raise UsageError(f"{path}: must be {name}, as in the pod's template (is {patch!r})")
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = patched(merged.get(key, {}), value, f"{path}.{key}")
        return merged
    if isinstance(base, list) and isinstance(patch, list):
        for identity in ("mountPath", "name"):
            if base and patch and all(isinstance(i, dict) and identity in i for i in (*base, *patch)):
                given = {item[identity]: item for item in patch}
                kept = {i[identity]: patched(i, given.get(i[identity], {}), f"{path}[{i[identity]}]") for i in base}
                return [*kept.values(), *(patched({}, given[name]) for name in given if name not in kept)]
    return {k: patched({}, v) for k, v in patch.items() if v is not None} if isinstance(patch, dict) else patch


def _pod_template(job: Job, shipment: Shipment, configs: list[str]) -> dict[str, Any]:
    volumes, mounts = _volumes(job, configs)
    container = {
        "name": contract.CONTAINER,
        "image": job.image_or_default,
        "imagePullPolicy": "IfNotPresent",
        "command": [_literal(word) for word in _command(job, shipment)],
        "env": _env(job, shipment),
        "ports": [{"name": "pytorchjob-port", "containerPort": contract.RDZV_PORT}],
        **_resources(job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePath": contract.TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    tolerations = [t.model_dump(exclude_defaults=True) for t in job.nodes.tolerations]
    return {
        "metadata": {
            "labels": {**labels.MANAGED_BY, labels.JOB: job.name},
            "annotations": {"sidecar.istio.io/inject": "false"},  # a sidecar would keep the pods from completing
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",  # else each start walks through all files of a claim
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **({"nodeSelector": dict(job.nodes.selector)} if job.nodes.selector else {}),
            **({"tolerations": tolerations} if tolerations else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _command(job: Job, shipment: Shipment) -> list[str]:
    command = [shipment.script, *job.command[1:]] if shipment.script else job.command
    if shipment.runtime is None:
        return ["python3", "-u", "-m", "flk_runtime", "--", *command]
    return ["python3", "-u", f"{contract.SHIP_FOLDER}/{contract.RUNTIME_ARCHIVE}", "--", *command]


def _env(job: Job, shipment: Shipment) -> list[dict[str, Any]]:
    place = {
        contract.RDZV_ENDPOINT: f"{job.name}-worker-0:{contract.RDZV_PORT}",
        contract.WORK: contract.WORK_FOLDER,
        contract.TERMINATION_LOG: contract.TERMINATION_LOG_PATH,
        "HOME": contract.WORK_FOLDER,  # a numeric user has none
    }
    if shipment.code is not None:
        place |= {contract.CODE: contract.SHIP_FOLDER, contract.CODE_HASH: shipment.sha256}
    fields = {
        contract.POD_INDEX: f"metadata.labels['{labels.REPLICA_INDEX}']",
        contract.POD_NAME: "metadata.name",
        contract.POD_IP: "status.podIP",
        contract.NODE_NAME: "spec.nodeName",
    }
    plain = {name: value for name, value in (place | environment(job)).items() if name not in job.secrets}
    secrets = ((name, *reference.split(":", 1)) for name, reference in job.secrets.items())
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": contract.CPUS, "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}},
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in secrets),
    ]


def _literal(text: str) -> str:
    """Text that Kubernetes hands on unchanged: it would replace ``$(NAME)``."""
    return text.replace("$", "$$")


def _resources(job: Job) -> dict[str, Any]:
    """Requests, equal to limits except for processors: a limit would stop ranks in mid-step, and all wait for each."""
    asked = {
        "memory": job.resources.memory,
        "nvidia.com/gpu": str(job.resources.gpu) if job.resources.gpu else None,
        **fabrics()[job.fabric].limits,
    }
    limits = {name: amount for name, amount in asked.items() if amount is not None}
    requests = {**({"cpu": job.resources.cpu} if job.resources.cpu else {}), **limits}
    resources = {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}
    return {"resources": resources} if resources else {}


def _volumes(job: Job, configs: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    size = {"sizeLimit": job.resources.shm} if job.resources.shm else {}
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": contract.WORK_FOLDER},
        {"name": "shm", "mountPath": _SHM},
    ]
    if configs:
        volumes.append({"name": "ship", "projected": {"sources": [{"configMap": {"name": name}} for name in configs]}})
        mounts.append({"name": "ship", "mountPath": contract.SHIP_FOLDER, "readOnly": True})
    claims = [tuple(claim.split(":", 1)) for claim in job.volumes]
    if job.checkpoint is not None:
        claims.append((job.checkpoint.volume, job.checkpoint.path))
    else:
        volumes.append({"name": "checkpoint", "emptyDir": {}})
        mounts.append({"name": "checkpoint", "mountPath": contract.CHECKPOINT_FOLDER})
    known: dict[str, str] = {}  # a claim that is mounted twice is one volume
    for claim, path in claims:
        if claim not in known:
            known[claim] = f"claim-{len(known)}"
            volumes.append({"name": known[claim], "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": known[claim], "mountPath": path})
    return volumes, mounts


def _parts(shipment: Shipment) -> Iterator[dict[str, str]]:
    """The data of each ConfigMap: the runtime, and the code in as many pieces as it takes."""
    if shipment.runtime is None:
        return
    data = {contract.RUNTIME_ARCHIVE: _base64(shipment.runtime)}
    rest, room, number = shipment.code or b"", CHUNK - len(shipment.runtime), 0
    while rest:
        data[f"{contract.CODE_ARCHIVE}.{number:03}"] = _base64(rest[:room])
        rest, room, number = rest[room:], CHUNK, number + 1
        if rest:
            yield data
            data = {}
    yield data


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
