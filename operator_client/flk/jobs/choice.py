"""Choose the target and the gang scheduler where a job says `auto`, from the APIs that the cluster serves."""

from __future__ import annotations

import contextlib

from flk.errors import ForbiddenError, MissingApiError
from flk.kube import RequestTarget, Resource
from flk.observe.client import JobClient
from flk.observe.resources import POD_GROUPS, RESOURCES, TRAINING_RUNTIMES
from flk.spec.job import Job
from flk.targets.gang import GANGS, NONE
from flk.targets.trainjob import RUNTIME
from flk_runtime.contract.strategies import AUTO


def chosen(client: JobClient, job: Job) -> Job:
    """Return the job with a target and a gang in place of `auto`. Asks the cluster only for these."""
    if job.target == AUTO:
        job = job.changed(target=_target(client))
    if job.gang == AUTO:
        job = job.changed(gang=_gang(client, job))
    return job


def _target(client: JobClient) -> str:
    """Return the first target that the cluster serves. A TrainJob needs flk's runtime too; any cluster has Jobs."""
    for name, resource in RESOURCES.items():
        if _serves(client, resource) and (name != "trainjob" or _has_runtime(client)):
            return name
    return "job"


def _gang(client: JobClient, job: Job) -> str:
    """Return the first gang scheduler that the cluster has. A TrainJob gets none: it cannot name a scheduler.

    Raises MissingApiError if the cluster has one, in a version that flk does not know: without it, jobs may deadlock.
    """
    if job.target == "trainjob":
        return NONE
    unknown = None
    for name, gang in GANGS.items():
        try:
            client.api.served(POD_GROUPS[gang.group])
            return name
        except MissingApiError as error:
            unknown = error if error.served else unknown
    if unknown:
        raise unknown
    return NONE


def _serves(client: JobClient, resource: Resource) -> bool:
    try:
        client.api.served(resource)
    except MissingApiError:
        return False
    return True


def _has_runtime(client: JobClient) -> bool:
    with contextlib.suppress(ForbiddenError):
        return client.find_at(RequestTarget(TRAINING_RUNTIMES, None, RUNTIME)) is not None
    return False
