"""The table of checks, and `examine`, which applies them to what was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from flk.health.capacity import check_capacity, check_gpus
from flk.health.controllers import check_api, check_controllers, check_runtime, check_server
from flk.health.facts import Facts, Level, Pods, Result
from flk.health.namespace import check_admission, check_limit_ranges, check_pod_security, check_quotas
from flk.health.references import check_claims, check_priority_class, check_queue, check_secrets, check_service_account
from flk.health.rights import check_rights

CLUSTER_CHECKS: Final[tuple[Callable[[Facts], Iterator[Result]], ...]] = (
    check_server,
    check_api,
    check_runtime,
    check_controllers,
    check_rights,
    check_gpus,
)
JOB_CHECKS: Final[tuple[Callable[[Facts, Pods], Iterator[Result]], ...]] = (
    check_quotas,
    check_limit_ranges,
    check_pod_security,
    check_service_account,
    check_priority_class,
    check_queue,
    check_secrets,
    check_claims,
    check_capacity,
)


def examine(facts: Facts, pods: Pods | None) -> list[Result]:
    """Return what every check found; those of a job only with its pods."""
    results = [result for check in CLUSTER_CHECKS for result in check(facts)]
    if pods is not None:
        of_job = [result for check in JOB_CHECKS for result in check(facts, pods)]
        results += of_job
        # The API server's refusal of a pod repeats what a check of its own has found.
        if not any(result.level is Level.FAILED for result in of_job):
            results += check_admission(facts, pods)
    return results
