"""The environment variables of a job: those that all ranks share, in every pod and under `flk run`, and the rendezvous.

`flk.manifest.pod` adds the variables of a pod, and the launcher adds torchrun's variables.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

from flk.spec import labels
from flk.spec.hardware import FABRICS
from flk.spec.job import Job
from flk.spec.options import rows
from flk.spec.parts import HUB_MODULE, DiLoCo
from flk.targets import Target
from flk.targets.rendezvous import KEYS, secret_name, secret_name_of
from flk_runtime.contract import pod_env, pod_layout, user_env
from flk_runtime.contract.options import DILOCO
from flk_runtime.contract.secrets import names_secret


def environment(job: Job) -> dict[str, str]:
    """Return the variables of ``job``, which has a name. The user's win over the fabric's, and these over flk's."""
    if job.name is None:
        raise ValueError("the job has no name yet")
    values = {row.option.variable: getattr(job, row.path[0]) for row in rows(Job) if row.option.variable}
    own: dict[str, str] = {variable: str(value) for variable, value in values.items() if value is not None}
    own |= {
        pod_env.PODS: str(job.most_pods),
        pod_env.PROCESSES: str(job.processes_per_pod),
        user_env.CHECKPOINT: checkpoint_place(job),
    }
    if job.pip:
        own[pod_env.PIP] = "\n".join(job.pip)
    if job.elastic is not None:
        own |= {pod_env.MIN_PODS: str(job.elastic.min), pod_env.BATCH: job.elastic.batch}
    if job.spares:
        own[pod_env.SPARES] = str(job.spares)
    if job.strategy == DILOCO:
        own |= {pod_env.DILOCO_OPTIONS: (job.diloco or DiLoCo()).options(), user_env.WORKERS: str(job.workers)}
    return own | FABRICS[job.fabric].env | job.env


def checkpoint_place(job: Job) -> str:
    """Return the folder of the job's checkpoints in a pod, or their address in S3.

    It ends with the job's name, so that jobs can share a volume or a bucket.
    """
    if job.checkpoint is None:
        return pod_layout.CHECKPOINT_FOLDER
    return f"{job.checkpoint.address or job.checkpoint.path}/{job.name}"


def warnings(job: Job) -> list[str]:
    """Return one sentence for each setting that is allowed but probably a mistake."""
    found = [
        f"env.{name} looks like a secret, but everybody who reads the job can read it: use --secret {name}=SECRET:KEY"
        for name in job.env
        if names_secret(name)
    ]
    if job.diloco and job.strategy != DILOCO:
        found.append(f"diloco has no effect under strategy {job.strategy}: use --strategy {DILOCO}")
    return found


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
    return [from_secret(variable, name, key, optional=True) for variable, key in KEYS.items()]


def from_secret(variable: str, secret: str, key: str, **more: bool) -> dict[str, Any]:
    """Return a variable of a pod whose value is a key of a Secret."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, **more}}}


def outer_rendezvous_variables(job: Job, target: Target) -> list[dict[str, Any]]:
    """Return the variables of a pod that say where the workers meet; none under the other strategies.

    Without an address of another job, the launcher of pod 0 serves the hub.
    """
    if job.strategy != DILOCO:
        return []
    diloco = job.diloco or DiLoCo()
    own = f"{target.pod_host(str(job.name), 0)}:{pod_layout.SERVICE_PORT}"
    plain: dict[str, str] = {pod_env.SERVICE_ADDRESS: diloco.hub or own}
    if not diloco.hub:
        plain[pod_env.SERVICE] = HUB_MODULE
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    if diloco.secret:
        secret, key = diloco.secret.split(":", 1)
        variables.append(from_secret(pod_env.SERVICE_SECRET, secret, key))
    return variables
