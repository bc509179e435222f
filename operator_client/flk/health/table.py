"""The tables of the checks before a job exists and of the causes that are found afterwards, by subject."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from flk.health import (
    admission,
    controllers,
    ending,
    failure,
    node,
    queue,
    references,
    rendezvous,
    scheduling,
    starting,
)
from flk.health.cause import Cause
from flk.health.cluster import Cluster, Pods, Result
from flk.health.scheduling import UNSCHEDULABLE
from flk.observe.model import Finding
from flk.observe.needs import may_be_of_hardware
from flk.observe.view import JobView

# The checks of a cluster and, given a job, of the job's needs, in the order of the report.
OF_CLUSTER: Final[tuple[Callable[[Cluster], Iterator[Result]], ...]] = (
    controllers.before,
    queue.gang,
    scheduling.gpus,
)
OF_JOB: Final[tuple[Callable[[Cluster, Pods], Iterator[Result]], ...]] = (
    admission.before,
    starting.before,
    queue.before,
    references.before,
    scheduling.before,
)
# Of each group only the first cause that is found counts: the most specific one comes first, the most general one last.
GROUPS: Final[tuple[tuple[Cause, ...], ...]] = (
    queue.CAUSES,
    (*controllers.CAUSES, *admission.CAUSES),
    starting.PULLS,
    (*references.REFERENCES, *starting.CAUSES),
    references.VOLUMES,
    scheduling.CAUSES,
    (UNSCHEDULABLE,),
    node.FAULTS,
    (*node.CAUSES, *rendezvous.CAUSES),
    failure.CAUSES,
    ending.CAUSES,
    ending.DELETION,
)
CAUSES: Final[tuple[Cause, ...]] = tuple(cause for group in GROUPS for cause in group)
_BY_CODE: Final = {cause.code.lower(): cause for cause in CAUSES}


def _codes(*subjects: Sequence[Cause]) -> frozenset[str]:
    return frozenset(cause.code for causes in subjects for cause in causes)


_OF_SCHEDULER: Final = _codes(scheduling.CAUSES, [UNSCHEDULABLE])
# Causes of pods that have no node: the job's --stuck-after limits how long they may last.
_OF_PLACEMENT: Final = _OF_SCHEDULER | _codes(references.VOLUMES) | {"WaitingForGang"}
_OF_HARDWARE: Final = _codes(node.FAULTS)
_FROM_OUTSIDE: Final = _codes([cause for cause in CAUSES if cause.from_outside])
ENDS: Final = _codes(ending.CAUSES)
LATER: Final = _codes(ending.DELETION)  # a cause that kept the job from running explains more than the deletion


def cause_of(code: str) -> Cause | None:
    """Return the cause of a code, whose case does not matter; None if there is none, as for a newer release's."""
    return _BY_CODE.get(code.lower())


def examine(cluster: Cluster, pods: Pods | None) -> list[Result]:
    """Return the results of all checks of a cluster and, given the pods of a job, of all checks of the job."""
    results = [result for check in OF_CLUSTER for result in check(cluster)]
    if pods is None or any(result.check == controllers.NAMESPACE for result in results):
        return results
    return results + [result for check in OF_JOB for result in check(cluster, pods)]


def find(view: JobView) -> list[Finding]:
    """Return the causes that are found in a view, the one to report first.

    Of each group only the first row that matches counts, because later rows are less specific. The end of a failed job
    is its cause, unless the end has no explanation of its own: then a cause that kept a pod away, or ended it from
    outside, comes first. In a job that has not ended, causes that do not resolve by themselves come first, and what
    keeps a pod from running now comes before what ended it; but a preempted pod waits because it was preempted.
    """
    if view.succeeded and not view.failed:
        return []
    found: list[Finding] = []
    for group in GROUPS:
        for cause in group:
            finding = cause.finding(view)
            if finding is not None:
                if finding.code in _OF_SCHEDULER:
                    finding = scheduling.with_patience(view, finding)
                found.append(replace(finding, stuck_after=_stuck_after(view, finding)))
                break
    named = {pod for finding in found if finding.code != UNSCHEDULABLE.code for pod in finding.pods}
    found = [f for f in found if f.code != UNSCHEDULABLE.code or not named & set(f.pods)]  # others say more of the pods
    if view.gone is not None:
        found = [f for f in found if f.code != queue.SUSPENDED]  # whoever suspends a job does not end it
    if not view.failed:
        return sorted(found, key=lambda f: (f.code in LATER, f.resolves_itself, _order_now(f, found)))
    end = next((finding for finding in found if finding.code in ENDS), None)
    return sorted(found, key=lambda finding: (not _explains(view, finding, end), finding is not end))


def _stuck_after(view: JobView, finding: Finding) -> float | None:
    """Return the job's --stuck-after where it concerns the finding. Pods that a quota refuses have no node either."""
    limit, patience = view.stuck_after, finding.stuck_after
    if limit is not None and finding.code == admission.EXCEEDED:
        return limit if finding.resolves_itself else min(limit, finding.grace)  # it never grants what it does not have
    return limit if limit is not None and finding.code in _OF_PLACEMENT else patience


def _order_now(finding: Finding, found: Sequence[Finding]) -> int:
    """Return the rank of a finding among all findings of a job that goes on by itself, 0 first."""
    if finding.code == "Preempted":
        return 0
    now = {pod for other in found if other.code not in _FROM_OUTSIDE for pod in other.pods}
    return 2 if finding.code in _FROM_OUTSIDE and now & set(finding.pods) else 1


def _explains(view: JobView, finding: Finding, end: Finding | None) -> bool:
    """Return whether a finding explains the end of a job better than the end itself."""
    if finding.code in _OF_HARDWARE:
        return may_be_of_hardware(ending.job_failure(view))
    if end is None or finding is end or (finding.resolves_itself and finding.code not in _FROM_OUTSIDE):
        return False
    explained_by = _BY_CODE[end.code.lower()].explained_by
    return explained_by == "any" or (explained_by == "same pod" and bool(set(finding.pods) & set(end.pods)))
