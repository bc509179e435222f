"""The volumes of a pod: flk's own, and those that the job mounts."""

from __future__ import annotations

from typing import Any, Final

from flk.manifest.outer_rendezvous import outer_rendezvous_volume
from flk.spec.job import Job
from flk.spec.mounts import CLAIM, SOURCES, Mount
from flk_runtime.contract import pod_layout

SHM: Final = "/dev/shm"  # noqa: S108 - not a temporary file; its default size of 64 MiB is too small for NCCL
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
        {"name": "shm", "mountPath": SHM},
    ]
    if config_maps:
        sources = [{"configMap": {"name": name}} for name in config_maps]
        volumes.append({"name": "ship", "projected": {"sources": sources}})
        mounts.append({"name": "ship", "mountPath": pod_layout.SHIP_FOLDER, "readOnly": True})
    if job.memory_path and job.memory_mount is None:
        volumes.append({"name": "memory", "emptyDir": {}})
        mounts.append({"name": "memory", "mountPath": job.memory_path})
    if job.records is not None:
        volumes.append({"name": "api", "projected": {"sources": _API_SOURCES}})
        mounts.append({"name": "api", "mountPath": pod_layout.API_FOLDER, "readOnly": True})
    certificates, certificate_mounts = outer_rendezvous_volume(job)
    volumes += certificates
    mounts += certificate_mounts
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
        read_only = {"readOnly": True} if mount.read_only or SOURCES[mount.kind].read_only else {}
        mounts.append({"name": names[mount.source], "mountPath": mount.path, **read_only})
    return volumes, mounts
