"""Choose what a job leaves to the cluster: its target and its gang scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from flk.errors import ApiError, ForbiddenError, MissingApiError, UsageError
from flk.kube import RequestTarget
from flk.observe.client import JobClient
from flk.observe.resources import CONFIG_MAPS, POD_GROUPS, RESOURCES, TRAINING_RUNTIMES
from flk.spec import file
from flk.spec.job import Job
from flk.spec.names import NO_GANG
from flk.targets import TARGETS
from flk.targets.gang import GANGS
from flk.targets.trainjob import RUNTIME
from flk_runtime.contract.options import AUTO

_KUEUE_CONFIG: Final = RequestTarget(CONFIG_MAPS, "kueue-system", "kueue-manager-config")
_LAST: Final = "job"  # the target that every cluster serves

T = TypeVar("T")


def first_that_fits(client: JobClient, job: Job, render: Callable[[Job], T]) -> T:
    """Return what ``render`` makes of the job with the first target and gang that can express it.

    ``render`` raises UsageError where a target cannot express the job. If none can, the first error is raised.
    """
    refusals: list[UsageError] = []
    for name in targets(client, job.target, job.queue, elastic=job.elastic is not None):
        try:
            return render(with_gang(client, job.changed(target=name)))
        except UsageError as error:
            refusals.append(error)
    raise refusals[0]


def targets(client: JobClient, target: str | None, queue: str | None, *, elastic: bool = False) -> Iterator[str]:
    """Yield the target; where it is left to the cluster, each one that can be used, the best first.

    A TrainJob needs flk's runtime. A job with a queue needs a kind that Kueue manages, as far as its configuration may
    be read. For an elastic job without a queue, kinds whose number of pods `flk scale` can change come first. The last
    resort is a Job of Kubernetes.
    """
    if target not in (None, AUTO):
        yield target
        return
    managed = _managed(client) if queue else []
    usable = [name for name, adapter in TARGETS.items() if not managed or adapter.framework in managed]
    if elastic and not queue:
        usable.sort(key=lambda name: not TARGETS[name].scalable)
    client.api.ask_what_is_served()
    for name in dict.fromkeys([*usable, _LAST]):
        if name == _LAST or (client.api.serves(RESOURCES[name]) and (name != "trainjob" or _has_runtime(client))):
            yield name


def with_gang(client: JobClient, job: Job) -> Job:
    """Return the job with the first gang scheduler that the cluster has in place of ``auto``; a TrainJob gets none.

    Raises MissingApiError if the cluster has one, in a version that flk does not know: without it, jobs may deadlock.
    """
    if job.gang != AUTO:
        return job
    if job.target == "trainjob":  # which cannot name a scheduler
        return job.changed(gang=NO_GANG)
    unknown = None
    for name, gang in GANGS.items():
        try:
            client.api.served(POD_GROUPS[gang.group])
            return job.changed(gang=name)
        except MissingApiError as error:
            unknown = error if error.served else unknown
    if unknown:
        raise unknown
    return job.changed(gang=NO_GANG)


def _has_runtime(client: JobClient) -> bool:
    with contextlib.suppress(ForbiddenError):
        return client.find_at(RequestTarget(TRAINING_RUNTIMES, None, RUNTIME)) is not None
    return False


def _managed(client: JobClient) -> list[Any]:
    """Return the frameworks that Kueue's configuration lists; none where it is not there or may not be read."""
    with contextlib.suppress(ApiError, UsageError):
        data = (client.find_at(_KUEUE_CONFIG) or {}).get("data") or {}
        config = file.mapping(data.get("controller_manager_config.yaml", ""), "Kueue's configuration")
        integrations = config.get("integrations")
        listed = integrations.get("frameworks") if isinstance(integrations, dict) else None
        return listed if isinstance(listed, list) else []
    return []
