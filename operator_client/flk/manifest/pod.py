"""The pod template of a job: the container with its environment, resources and volumes. All pods are equal."""

from __future__ import annotations

import shlex
from typing import Any, Final

from flk.errors import UsageError
from flk.manifest.bundle import Bundle
from flk.manifest.environment import (
    environment,
    from_secret,
    outer_rendezvous_variables,
    rendezvous_port,
    secret_variables,
)
from flk.spec import labels
from flk.spec.fields import PULL_POLICIES
from flk.spec.hardware import FABRICS, gpu_terms
from flk.spec.job import Job
from flk.spec.mounts import CLAIM, SOURCES, Mount
from flk.spec.names import DEFAULT_IMAGE, IMAGE_ARCHITECTURE, split_topology
from flk.spec.parts import PodSettings
from flk.targets import TARGETS, Target
from flk.targets.gang import add_gang
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import JobRecord

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


def pod_template(job: Job, bundle: Bundle, config_maps: list[str], namespace: str | None = None) -> dict[str, Any]:
    """Return the template of the pods, with the job's patch merged into it.

    ``config_maps`` are the names of those that hold the bundle. Raises UsageError if the patch removes the container.
    """
    target = TARGETS[job.target_or_default]
    template = _template(job, bundle, config_maps, rendezvous_port(job, namespace), target)
    add_gang(template, job)
    if not job.patch:
        return template
    merged: dict[str, Any] = patched(template, job.patch)
    containers = merged.get("spec", {}).get("containers", [])
    if not any(isinstance(c, dict) and c.get("name") == target.container for c in containers):
        raise UsageError(f"patch: leaves no container named {target.container}, which the operator looks for")
    return merged


def _template(job: Job, bundle: Bundle, config_maps: list[str], port: int, target: Target) -> dict[str, Any]:
    volumes, mounts = volumes_and_mounts(job, config_maps)
    container = {
        "name": target.container,
        "image": job.image_or_default,
        "imagePullPolicy": job.image_pull_policy or PULL_POLICIES[0],
        "command": [_literal(word) for word in _command(job, bundle)],
        "env": _env(job, bundle, port, target),
        "ports": [{"name": target.port_name, "containerPort": port}],
        **_resources(job),
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePath": pod_layout.TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pods = job.pods or PodSettings.model_construct()
    tolerations = [t.model_dump(exclude_defaults=True) for t in job.nodes.tolerations]
    return {
        "metadata": {
            "labels": {**pods.labels, **labels.MANAGED_BY, labels.JOB: job.name},
            # A pod with a sidecar goes on.
            "annotations": {"sidecar.istio.io/inject": "false", **_queue_topology(job), **pods.annotations},
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
            **({"nodeSelector": selector} if (selector := _node_selector(job)) else {}),
            **({"tolerations": tolerations} if tolerations else {}),
            **({"affinity": affinity} if (affinity := _affinity(job)) else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _queue_topology(job: Job) -> dict[str, str]:
    """Return the annotation by which Kueue's scheduler of topologies keeps a job in a queue together."""
    if not job.topology:
        return {}
    key, strength = split_topology(str(job.topology))
    return {labels.QUEUE_TOPOLOGY[strength]: key}


def _node_selector(job: Job) -> dict[str, str]:
    """Return the labels of the nodes: what the job says, and the architecture of the image where it is known.

    Otherwise, in a cluster with other nodes too, pods would come to nodes that cannot run the image.
    """
    known = IMAGE_ARCHITECTURE if job.image_or_default == DEFAULT_IMAGE else {}
    return {**known, **job.nodes.selector}


def _affinity(job: Job) -> dict[str, Any]:
    """Return the affinity of a job's pods to nodes and to each other; empty if the job asks for neither."""
    affinity: dict[str, Any] = {}
    if terms := _node_terms(job):
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    if job.topology:
        affinity["podAffinity"] = _pod_affinity(job, *split_topology(job.topology))
    return affinity


def _node_terms(job: Job) -> list[dict[str, Any]]:
    """Return the terms of which a node must fulfil one: it has the job's type of GPUs, and is none to avoid."""
    terms = gpu_terms(job.resources.gpu_type) if job.resources.gpu_type else []
    # An expression may have one name only, and all expressions of a term must be true.
    avoided = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in job.nodes.avoid]
    return [{**term, "matchFields": avoided} for term in terms or [{}]] if avoided else terms


def _pod_affinity(job: Job, key: str, strength: str) -> dict[str, Any]:
    """Return the affinity of pods to each other: on nodes with the same value of the label ``key``."""
    term = {"topologyKey": key, "labelSelector": {"matchLabels": {labels.JOB: job.name}}}
    if strength == "required":
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


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
        pod_env.MEMORY_ROOT: pod_layout.SHM,
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
        user_env.NAMESPACE: "metadata.namespace",
        pod_env.POD_IP: "status.podIP",
        user_env.NODE_NAME: "spec.nodeName",
        pod_env.STARTED: f"metadata.annotations['{labels.STARTED}']",
    }
    if job.metrics:  # they are told which run this is
        of_pods[user_env.POD_IMAGE] = job.image_or_default
    plain = {name: value for name, value in (of_pods | environment(job)).items() if name not in job.secrets}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": pod_env.CPUS, "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}},
        *secret_variables(job),
        *({"name": name, "value": _literal(value)} for name, value in plain.items()),
        *outer_rendezvous_variables(job, target),
        *(from_secret(name, *reference.split(":", 1)) for name, reference in job.secrets.items()),
    ]


def _literal(text: str) -> str:
    """Escape text in which Kubernetes would replace ``$(NAME)``."""
    return text.replace("$", "$$")


def _resources(job: Job) -> dict[str, Any]:
    """Return requests and limits, which are equal unless the job gives a limit; CPU has none by itself.

    A CPU limit would throttle ranks in the middle of a step, and all other ranks would wait for them.
    """
    wanted = job.resources
    amounts = {
        "memory": wanted.memory,
        "ephemeral-storage": wanted.ephemeral_storage,
        "nvidia.com/gpu": str(wanted.gpu) if wanted.gpu else None,
        **{name: str(amount) for name, amount in (wanted.extended or {}).items()},
        **FABRICS[job.fabric].pod_limits(wanted.gpu),
    }
    limits = {**amounts, "cpu": wanted.cpu_limit, "memory": wanted.memory_limit or wanted.memory}
    kinds = {"limits": limits, "requests": {"cpu": wanted.cpu, **amounts}}
    given = {kind: {name: amount for name, amount in of.items() if amount is not None} for kind, of in kinds.items()}
    resources = {kind: of for kind, of in given.items() if of}
    return {"resources": resources} if resources else {}


# Token, certificate and namespace for the API server. They are not at Kubernetes' path, where every library would look.
_API_SOURCES: Final[list[dict[str, Any]]] = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}], "optional": True}},
    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
]


def volumes_and_mounts(job: Job, config_maps: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of a pod of ``job`` and where its container mounts them.

    ``config_maps`` are the names of those that hold the bundle.
    """
    size = {"sizeLimit": job.resources.shm} if job.resources.shm else {}
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "work", "mountPath": pod_layout.WORK_FOLDER},
        {"name": "shm", "mountPath": pod_layout.SHM},  # the default size of 64 MiB is too small for NCCL
    ]
    if config_maps:
        sources = [{"configMap": {"name": name}} for name in config_maps]
        volumes.append({"name": "ship", "projected": {"sources": sources}})
        mounts.append({"name": "ship", "mountPath": pod_layout.SHIP_FOLDER, "readOnly": True})
    if job.records is not None:
        volumes.append({"name": "api", "projected": {"sources": _API_SOURCES}})
        mounts.append({"name": "api", "mountPath": pod_layout.API_FOLDER, "readOnly": True})
    own = [Mount.parse(text) for text in job.volumes]
    if job.checkpoint is None:
        volumes.append({"name": "checkpoint", "emptyDir": {}})
        mounts.append({"name": "checkpoint", "mountPath": pod_layout.CHECKPOINT_FOLDER})
    elif job.checkpoint.claim:
        own.append(Mount(CLAIM, *job.checkpoint.claim))
    names: dict[str, str] = {}  # what is mounted twice is one volume
    for mount in own:
        if mount.source not in names:
            names[mount.source] = f"{mount.kind}-{len(names)}"
            volumes.append({"name": names[mount.source], **SOURCES[mount.kind].volume(mount.name)})
        read_only = {"readOnly": True} if mount.is_read_only else {}
        mounts.append({"name": names[mount.source], "mountPath": mount.path, **read_only})
    return volumes, mounts


_INSTEAD: Final = {"value": "valueFrom", "valueFrom": "value"}  # a variable has one of both


def patched(base: Any, patch: Any, path: str = "patch") -> Any:
    """Return ``base`` merged with ``patch``. ``path`` names the patch in errors.

    Mappings are merged, and null removes a key. ``value`` takes the place of ``valueFrom``, and the other way round.
    Lists of mappings that all have a ``mountPath``, or all have a ``name``, are merged by it; other lists are replaced.
    Raises UsageError if a mapping or a list that is not empty would be replaced by something else.
    """
    for shape, name in ((dict, "a mapping"), (list, "a list")):
        if isinstance(base, shape) and base and not isinstance(patch, shape):
            raise UsageError(f"{path}: must be {name}, as in the pod template (is {patch!r})")
    if isinstance(base, dict) and isinstance(patch, dict):
        # A volume has one source.
        replaced = bool({*patch} - {"name"}) and path.startswith("patch.spec.volumes[") and path.endswith("]")
        merged = {key: base[key] for key in base if key in patch or not replaced}
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                if (other := _INSTEAD.get(key)) and other not in patch:
                    merged.pop(other, None)
                merged[key] = patched(merged.get(key), value, f"{path}.{key}")
        return merged
    if isinstance(base, list) and isinstance(patch, list) and base and patch:
        for identity in ("mountPath", "name"):
            if all(isinstance(item, dict) and isinstance(item.get(identity), str) for item in (*base, *patch)):
                given = {item[identity]: item for item in patch}
                kept = {i[identity]: patched(i, given.get(i[identity], {}), f"{path}[{i[identity]}]") for i in base}
                return [*kept.values(), *(_without_nulls(item) for name, item in given.items() if name not in kept)]
    return _without_nulls(patch)


def _without_nulls(value: Any) -> Any:
    """Return a value of a patch without the keys that are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
