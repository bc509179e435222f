"""The Secret with which the launchers of a job authenticate each other: its name, and variables that refer to it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, Final

from flk.spec import labels
from flk.targets import target_of
from flk.targets.model import Object
from flk_runtime.contract import pod_env, pod_layout, user_env

KEYS: Final = {pod_env.JOB_UID: "uid", pod_env.RDZV_SECRET: "secret"}  # of the Secret, by the variables that have them


def secret_name(job: str, submission: str = "") -> str:
    """Return the name of the Secret of a job, of which each submission has one of its own.

    A kubelet keeps what it has read of a Secret that cannot change as long as a pod of its node uses it, also when
    another Secret has taken the name: some pods of a job that is created again would have the secret of the one before.
    """
    return "-".join(filter(None, (job, "rendezvous", submission[:8])))


def secret_name_of(job: Object) -> str:
    """Return the name of the Secret of the object of a job."""
    return secret_name(job["metadata"]["name"], labels.annotations_of(job).get(labels.SUBMISSION, ""))


def needs_secret(job: Object) -> bool:
    """Return whether flk makes a Secret for the job, for its launchers or for its record, which has the UID."""
    values = _values(job)
    return (
        authenticates(job)
        or pod_env.RECORDS in values
        or bool(pod_layout.on_volume(values.get(user_env.CHECKPOINT, "")))
    )


def authenticates(job: Object) -> bool:
    """Return whether launchers of the job authenticate each other: it has several, or is elastic and may grow.

    For these the chart makes a Secret too. It has no UID: Helm knows none before the job exists.
    """
    pods = sum(role.count for role in target_of(job).replicas(job).values())
    return pods > 1 or pod_env.MIN_PODS in _values(job)


def _values(job: Object) -> dict[str, str]:
    """Return the values of a job's variables, by name."""
    variables = itertools.chain.from_iterable(environments(job["spec"]))
    return {str(each.get("name")): str(each.get("value") or "") for each in variables}


def name_secret(job: Object) -> None:
    """Have the variables of a job's pods name the Secret of its submission, if they name one of flk's.

    The pods start without it: kubectl, with which such a manifest can be created, makes no Secret.
    """
    for reference in _references(job):
        reference |= {"name": secret_name_of(job), "optional": True}


def require_secret(job: Object) -> None:
    """Have the pods of a job wait for their Secret: Kueue, and who resumes the job, may start them before it exists."""
    for reference in _references(job):
        reference["optional"] = False


def _references(job: Object) -> Iterator[Object]:
    """Yield the references of a job's variables to a Secret of flk's."""
    own = re.compile(re.escape(secret_name(job["metadata"]["name"])) + "(-[0-9a-f]{8})?")
    for variable in (each for variables in environments(job["spec"]) for each in variables):
        source = variable.get("valueFrom")
        reference = source.get("secretKeyRef") if isinstance(source, dict) else None
        if isinstance(reference, dict) and variable.get("name") in KEYS and own.fullmatch(str(reference.get("name"))):
            yield reference


def environments(value: Any) -> Iterator[list[Object]]:
    """Yield the variables of each container below ``value``, which is a part of a job's object: its own lists."""
    variables = value.get("env") if isinstance(value, dict) else None
    # The API server refuses other variables. A controller's own object may have them.
    if isinstance(variables, list) and all(isinstance(each, dict) for each in variables):
        yield variables
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from environments(each)
