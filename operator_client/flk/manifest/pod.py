"""The pod template of a job: the container with its environment, resources and volumes. All pods are equal."""

from __future__ import annotations

import shlex
from typing import Any, Final

from flk import labels
from flk.errors import UsageError
from flk.manifest.bundle import Bundle
from flk.manifest.environment import environment
from flk.manifest.outer_rendezvous import outer_rendezvous_variables, outer_rendezvous_volume
from flk.manifest.patch import patched
from flk.manifest.rendezvous import rendezvous_port, secret_variables
from flk.spec.fabric import fabrics
from flk.spec.fields import split_mount, split_topology
from flk.spec.job import Job, PodSettings
from flk.targets import TARGETS, Target
from flk.targets.gang import add_gang
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord
from flk_runtime.contract.strategies import AUTO

USER: Final = 10001  # no image has this user; it is numeric, so that Kubernetes can check runAsNonRoot
LAUNCHER_GRACE: Final = 5  # seconds after the ranks' grace period in which the launcher ends them and reports
_NO_PROGRAM: Final = JobRecord(
    "failed",
    Kind.USAGE.meaning.code,
    failure=Failure(Kind.USAGE, 0, pod_name="%s", node="%s", message="the image has no %s"),
    no_retry_reason=f"not retried: {Kind.USAGE.meaning.reason}",
)
_NO_PROGRAM_FORMAT: Final = _NO_PROGRAM.to_json().replace('"pod":0', '"pod":%s')  # of printf
# Kubernetes gives a container whose program does not exist the exit code 128, after which the operator starts the pod
# again, for ever. With this script it is a usage error with a job record, which is final.
START: Final = (
    'command -v "$1" >/dev/null && exec "$@"; '
    'echo "[pod $FLK_POD_INDEX] error: the image has no $1" >&2; '
    f"printf {shlex.quote(_NO_PROGRAM_FORMAT)} "
    '"$FLK_POD_INDEX" "$FLK_POD_NAME" "$FLK_NODE_NAME" "$1" >"$FLK_TERMINATION_LOG"; exit 2'
)
# Token, certificate and namespace for the API server. They are not at Kubernetes' path, where every library would look.
_API_SOURCES: Final[list[dict[str, Any]]] = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}], "optional": True}},
    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
]
_SHM: Final = "/dev/shm"  # noqa: S108 - not a temporary file; its default size of 64 MiB is too small for NCCL


def pod_template(job: Job, bundle: Bundle, config_maps: list[str], namespace: str | None = None) -> dict[str, Any]:
    """Return the template of the pods, with the job's patch merged into it.

    ``config_maps`` are the names of those that hold the bundle. Raises UsageError if the patch removes the container.
    """
    target = chosen_target(job)
    template = _template(job, bundle, config_maps, rendezvous_port(job, namespace), target)
    add_gang(template, job)
    if not job.patch:
        return template
    merged: dict[str, Any] = patched(template, job.patch)
    containers = merged.get("spec", {}).get("containers", [])
    if not any(isinstance(c, dict) and c.get("name") == target.container for c in containers):
        raise UsageError(f"patch: leaves no container named {target.container}, which the operator looks for")
    return merged


def chosen_target(job: Job) -> Target:
    """Return the target of the job. Raises UsageError for ``auto``, which only a cluster can resolve."""
    name = job.target_or_default
    if name == AUTO:
        raise UsageError(
            "target: auto asks the cluster, which only flk submit does",
            hint=f"choose one: --target {', '.join(TARGETS)}",
        )
    return TARGETS[name]


def _template(job: Job, bundle: Bundle, config_maps: list[str], port: int, target: Target) -> dict[str, Any]:
    volumes, mounts = _volumes(job, config_maps)
    container = {
        "name": target.container,
        "image": job.image_or_default,
        "imagePullPolicy": "IfNotPresent",
        "command": [_literal(word) for word in _command(job, bundle)],
        "env": _env(job, bundle, port, target),
        "ports": [{"name": target.port_name, "containerPort": port}],
        **_resources(job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePath": pod_layout.TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pods = job.pods or PodSettings()
    tolerations = [t.model_dump(exclude_defaults=True) for t in job.nodes.tolerations]
    return {
        "metadata": {
            "labels": {**pods.labels, **labels.MANAGED_BY, labels.JOB: job.name},
            "annotations": {"sidecar.istio.io/inject": "false", **pods.annotations},  # a pod with a sidecar goes on
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": job.grace + LAUNCHER_GRACE,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",  # otherwise each start changes all files of a volume
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **({"serviceAccountName": pods.service_account} if pods.service_account else {}),
            **({"imagePullSecrets": [{"name": name} for name in pods.pull_secrets]} if pods.pull_secrets else {}),
            **({"priorityClassName": pods.priority_class} if pods.priority_class else {}),
            **({"nodeSelector": dict(job.nodes.selector)} if job.nodes.selector else {}),
            **({"tolerations": tolerations} if tolerations else {}),
            **({"affinity": _affinity(job)} if job.topology else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _affinity(job: Job) -> dict[str, Any]:
    """Return the affinity of a job's pods to each other: on nodes with the same value of a label."""
    key, strength = split_topology(str(job.topology))
    term = {"topologyKey": key, "labelSelector": {"matchLabels": {labels.JOB: job.name}}}
    if strength == "required":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


def _command(job: Job, bundle: Bundle) -> list[str]:
    command = [bundle.script, *job.command[1:]] if bundle.script else job.command
    runtime = ["-m", "flk_runtime"]
    if bundle.runtime is not None:
        runtime = [f"{pod_layout.SHIP_FOLDER}/{pod_layout.RUNTIME_ARCHIVE}"]
    return ["/bin/sh", "-c", START, "flk", "python3", "-u", *runtime, "--", *command]


def _env(job: Job, bundle: Bundle, port: int, target: Target) -> list[dict[str, Any]]:
    first = pod_layout.FIRST_POD if job.workers > 1 else 0
    of_pods = {
        pod_env.RDZV_ENDPOINT: f"{target.pod_host(str(job.name), first)}:{port}",
        pod_env.WORK: pod_layout.WORK_FOLDER,
        pod_env.MEMORY_ROOT: _SHM,
        pod_env.TERMINATION_LOG: pod_layout.TERMINATION_LOG_PATH,
        "HOME": pod_layout.WORK_FOLDER,  # a numeric user has no home folder
    }
    if job.resources.gpu:
        of_pods[pod_env.GPUS] = str(job.resources.gpu)
    if bundle.code is not None:
        of_pods |= {pod_env.CODE: pod_layout.SHIP_FOLDER, pod_env.CODE_HASH: bundle.sha256}
    fields = {
        pod_env.POD_INDEX: target.index_field,
        user_env.POD_NAME: "metadata.name",
        pod_env.POD_IP: "status.podIP",
        user_env.NODE_NAME: "spec.nodeName",
    }
    plain = {name: value for name, value in (of_pods | environment(job)).items() if name not in job.secrets}
    secrets = ((name, *reference.split(":", 1)) for name, reference in job.secrets.items())
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": pod_env.CPUS, "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}},
        *secret_variables(job),
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        *outer_rendezvous_variables(job, target),
        *({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in secrets),
    ]


def _literal(text: str) -> str:
    """Escape text in which Kubernetes would replace ``$(NAME)``."""
    return text.replace("$", "$$")


def _resources(job: Job) -> dict[str, Any]:
    """Return requests and limits, which are equal except for CPU.

    A CPU limit would throttle ranks in the middle of a step, and all other ranks would wait for them.
    """
    amounts = {
        "memory": job.resources.memory,
        "nvidia.com/gpu": str(job.resources.gpu) if job.resources.gpu else None,
        **{name: str(amount) for name, amount in (job.resources.extended or {}).items()},
        **fabrics()[job.fabric].pod_limits(job.resources.gpu),
    }
    limits = {name: amount for name, amount in amounts.items() if amount is not None}
    requests = {**({"cpu": job.resources.cpu} if job.resources.cpu else {}), **limits}
    resources = {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}
    return {"resources": resources} if resources else {}


def _volumes(job: Job, config_maps: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    size = {"sizeLimit": job.resources.shm} if job.resources.shm else {}
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": pod_layout.WORK_FOLDER},
        {"name": "shm", "mountPath": _SHM},
    ]
    if config_maps:
        sources = [{"configMap": {"name": name}} for name in config_maps]
        volumes.append({"name": "ship", "projected": {"sources": sources}})
        mounts.append({"name": "ship", "mountPath": pod_layout.SHIP_FOLDER, "readOnly": True})
    if job.records is not None:
        volumes.append({"name": "api", "projected": {"sources": _API_SOURCES}})
        mounts.append({"name": "api", "mountPath": pod_layout.API_FOLDER, "readOnly": True})
    certificates, certificate_mounts = outer_rendezvous_volume(job)
    volumes += certificates
    mounts += certificate_mounts
    claims = [split_mount(mount) for mount in job.volumes]
    if job.checkpoint is not None:
        claims += [job.checkpoint.claim] if job.checkpoint.claim else []
    else:
        volumes.append({"name": "checkpoint", "emptyDir": {}})
        mounts.append({"name": "checkpoint", "mountPath": pod_layout.CHECKPOINT_FOLDER})
    volume_of: dict[str, str] = {}  # a PersistentVolumeClaim that is mounted twice is one volume
    for claim, path in claims:
        if claim not in volume_of:
            volume_of[claim] = f"claim-{len(volume_of)}"
            volumes.append({"name": volume_of[claim], "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": volume_of[claim], "mountPath": path})
    return volumes, mounts
