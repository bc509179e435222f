"""Where the workers of strategy diloco meet: variables and the volume of a pod."""

from __future__ import annotations

from typing import Any

from flk.spec.diloco import TLS_FOLDER, DiLoCo
from flk.spec.job import Job
from flk.targets import Target
from flk_runtime import contract

_VOLUME = "meet"


def meeting_variables(job: Job, target: Target) -> list[dict[str, Any]]:
    """Return the variables of a pod that say where the workers meet; none under the other strategies.

    Without an address of another job, the launcher of pod 0 serves the hub.
    """
    if job.strategy != contract.DILOCO:
        return []
    diloco = job.diloco or DiLoCo()
    plain = {contract.MEET: diloco.meet or f"{target.pod_host(str(job.name), 0)}:{contract.MEET_PORT}"}
    if not diloco.meet:
        plain[contract.HUB_PORT] = str(contract.MEET_PORT)
    if diloco.tls:
        plain[contract.MEET_CA] = f"{TLS_FOLDER}/ca.crt"
        if not diloco.meet:
            plain[contract.MEET_CERTIFICATE] = TLS_FOLDER
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    if diloco.secret:
        secret, key = diloco.secret.split(":", 1)
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        variables.append({"name": contract.MEET_SECRET, "valueFrom": reference})
    return variables


def meeting_volume(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume of the certificates and its mount, as lists that are empty without TLS."""
    if not (job.diloco and job.diloco.tls):
        return [], []
    volume = {"name": _VOLUME, "secret": {"secretName": job.diloco.tls, "defaultMode": 0o440}}
    return [volume], [{"name": _VOLUME, "mountPath": TLS_FOLDER, "readOnly": True}]
