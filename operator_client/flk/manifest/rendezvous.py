"""The rendezvous of a job's pods: its port, and the Secret with which the launchers authenticate each other."""

from __future__ import annotations

import zlib
from typing import Any, Final

from flk import labels
from flk.spec.job import Job
from flk.targets.rendezvous import KEYS, secret_name, secret_name_of
from flk_runtime.contract import pod_env, pod_layout

# Ports for pods that use the network of their node: below the ports of Services (NodePort) and outgoing connections.
_NODE_PORTS: Final = range(24_000, 29_000)


def rendezvous_port(job: Job, namespace: str | None) -> int:
    """Return the port of the launcher of pod 0.

    Pods have an address of their own, so all jobs use the same port. With ``hostNetwork``, which a job's patch can set,
    the pods of two jobs may share the address of a node: then the port is derived from namespace and name.
    """
    spec = job.patch.get("spec") if job.patch else None
    if not (isinstance(spec, dict) and spec.get("hostNetwork") is True):
        return pod_layout.RDZV_PORT
    return _NODE_PORTS[zlib.adler32(f"{namespace or 'default'}/{job.name}".encode()) % len(_NODE_PORTS)]


def rendezvous_secret(job_manifest: dict[str, Any], secret: str) -> dict[str, Any]:
    """Return the Secret of a job that has been created, with its UID and this random text."""
    own_labels = {**labels.MANAGED_BY, labels.JOB: job_manifest["metadata"]["name"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": secret_name_of(job_manifest), "labels": own_labels},
        "immutable": True,
        "stringData": {KEYS[pod_env.JOB_UID]: job_manifest["metadata"]["uid"], KEYS[pod_env.RDZV_SECRET]: secret},
    }


def secret_variables(job: Job) -> list[dict[str, Any]]:
    """Return the variables of a pod that come from the Secret.

    They are optional, so that a job that kubectl creates, without a Secret, starts as well. `flk.jobs.lifecycle`
    requires them in the jobs for which it makes the Secret.
    """
    name = secret_name(str(job.name))
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}
        for variable, key in KEYS.items()
    ]
