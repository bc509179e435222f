"""The Secret with which the launchers of a job authenticate each other. It needs the UID of the job."""

from __future__ import annotations

import secrets

from flk import manifest
from flk.kube import Object
from flk.targets import target_of
from flk_runtime.contract.pod_env import RECORDS
from flk_runtime.contract.pod_layout import on_volume
from flk_runtime.contract.user_env import CHECKPOINT


def objects_with_uid(job: Object) -> list[Object]:
    """Return the manifests of objects that need the UID of the created job. The job owns them."""
    roles = [*target_of(job).replicas(job).values()]
    variables = roles[0].template["spec"]["containers"][0].get("env") or []
    values = {variable.get("name"): str(variable.get("value") or "") for variable in variables}
    keeps_record = RECORDS in values or on_volume(values.get(CHECKPOINT, ""))  # by the job's UID
    if sum(role.count for role in roles) == 1 and not keeps_record and "elasticPolicy" not in job["spec"]:
        return []  # there is no other launcher to authenticate
    return [manifest.rendezvous_secret(job, secrets.token_urlsafe(32))]
