"""The outer rendezvous: variables and the volume by which a pod finds the other workers of strategy diloco."""

from __future__ import annotations

from typing import Any

from flk.spec.diloco import HUB_MODULE, TLS_FOLDER, DiLoCo
from flk.spec.job import Job
from flk.targets import Target
from flk_runtime.contract import pod_env, pod_layout
from flk_runtime.contract.options import DILOCO

_VOLUME = "hub"


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
    if diloco.tls:
        plain[pod_env.SERVICE_CA] = f"{TLS_FOLDER}/ca.crt"
        if not diloco.hub:
            plain[pod_env.SERVICE_CERTIFICATE] = TLS_FOLDER
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    if diloco.secret:
        secret, key = diloco.secret.split(":", 1)
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        variables.append({"name": pod_env.SERVICE_SECRET, "valueFrom": reference})
    return variables


def outer_rendezvous_volume(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume of the certificates and its mount, as lists that are empty without TLS."""
    if not (job.diloco and job.diloco.tls):
        return [], []
    volume = {"name": _VOLUME, "secret": {"secretName": job.diloco.tls, "defaultMode": 0o440}}
    return [volume], [{"name": _VOLUME, "mountPath": TLS_FOLDER, "readOnly": True}]
