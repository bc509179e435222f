"""CAUSES: all causes in one table, and `find`, which applies it to a view."""

from __future__ import annotations

from typing import Final

from flk.health.admission import ADMISSION
from flk.health.cause import Cause
from flk.health.deadlock import DEADLOCK
from flk.health.deletion import DELETION
from flk.health.ending import ENDING
from flk.health.images import IMAGES
from flk.health.queueing import QUEUEING
from flk.health.running import RUNNING
from flk.health.scheduling import SCHEDULING, UNSCHEDULABLE
from flk.health.starting import STARTING
from flk.health.volumes import VOLUMES
from flk.observe.model import Finding
from flk.observe.view import JobView

# Within each group the row that says most comes first, and the last row takes what the others do not know.
GROUPS: Final = (
    QUEUEING,
    DEADLOCK,
    ADMISSION,
    IMAGES,
    STARTING,
    VOLUMES,
    SCHEDULING,
    (UNSCHEDULABLE,),
    RUNNING,
    ENDING,
    DELETION,
)
CAUSES: Final[tuple[Cause, ...]] = tuple(cause for group in GROUPS for cause in group)


# Ends that say little. What kept a pod away, or what ended it from outside, explains them.
_ABSENT: Final = ("RendezvousTimeout", "PodLost", "FailedWithoutTrace")
_SHALLOW: Final = ("ExitedWithCode", "KilledBySignal", "Failed")
LATER: Final = tuple(cause.code for cause in DELETION)  # what kept a job from running says more than that it is gone
_FROM_OUTSIDE: Final = ("Evicted", "Preempted", "NodeLost")


def find(view: JobView) -> list[Finding]:
    """Return the causes that are found in a view, the one to report first.

    Of each group only the first row that matches counts, because later rows say less of the same. A job that has failed
    is explained by its end, unless that says little: then by what kept a pod away, or ended it from outside. In a job
    that has not ended, what does not resolve by itself comes before what does. Of a job that is gone, or whose pods
    are, a cause that was found before comes first: what it was read from may be gone too.
    """
    if view.succeeded and not view.failed:
        return []
    before = view.kept.cause if view.kept else None
    found: list[Finding] = []
    for group in GROUPS:
        if before is not None and before.code in {cause.code for cause in group}:
            found.append(before)
            continue
        for cause in group:
            finding = cause.finding(view)
            if finding is not None:
                found.append(finding)
                break
    named = {pod for finding in found if finding.code != UNSCHEDULABLE.code for pod in finding.pods}
    found = [f for f in found if f.code != UNSCHEDULABLE.code or not named & set(f.pods)]  # others say more of the pods
    if before is not None:
        return sorted(found, key=lambda finding: (finding is not before, finding.code in LATER))
    if not view.failed:
        return sorted(found, key=lambda finding: (finding.code in LATER, finding.resolves_itself))
    codes = {cause.code for cause in ENDING}
    end = next((finding for finding in found if finding.code in codes), None)
    return sorted(found, key=lambda finding: (not _explains(finding, end), finding is not end))


def _explains(finding: Finding, end: Finding | None) -> bool:
    """Return whether a finding explains the end of a job better than the end itself."""
    if end is None or finding is end or (finding.resolves_itself and finding.code not in _FROM_OUTSIDE):
        return False
    same_pod = bool(set(finding.pods) & set(end.pods))
    return end.code in _ABSENT or (end.code in _SHALLOW and same_pod)
