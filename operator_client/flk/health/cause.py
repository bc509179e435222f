"""Cause: one row of the table of causes, and what its function finds in a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flk.kube import Object
from flk.observe.model import Evidence, Finding, PodState
from flk.observe.view import JobView, event_time
from flk.units import timestamp
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.pod_layout import CONTAINER


@dataclass(frozen=True)
class Found:
    """What the function of a cause has found. Its fields are those of Finding."""

    sentence: str
    remedy: str
    evidence: Sequence[Evidence]
    pods: Sequence[str] = ()
    since: float = 0.0  # 0: the time of the earliest evidence, else the creation of the job
    resolves_itself: bool | None = None  # None: as the table says
    exit_code: ExitCode | None = None  # None: as the table says


@dataclass(frozen=True)
class Cause:
    """One cause: how it is found, what it means, and what to do about it."""

    code: str  # upper camel case, stable
    title: str  # what has happened, in one line without a full stop
    meaning: str  # what that means for the job, and where flk reads it
    remedy: str  # what to do, for the page of the cause
    find: Callable[[JobView], Found | None] = field(repr=False)
    exit_code: ExitCode = ExitCode.INFRASTRUCTURE
    grace: float = 0.0  # seconds in which it does not yet count as stuck
    resolves_itself: bool = False

    def finding(self, view: JobView) -> Finding | None:
        """Return what this cause finds in a view, None if it is not there."""
        found = self.find(view)
        if found is None:
            return None
        times = [item.time for item in found.evidence if item.time]
        itself = self.resolves_itself if found.resolves_itself is None else found.resolves_itself
        return Finding(
            code=self.code,
            sentence=found.sentence,
            remedy=found.remedy,
            evidence=list(found.evidence),
            pods=list(found.pods),
            since=found.since or min(times, default=view.created),
            resolves_itself=itself,
            grace=self.grace,
            exit_code=int(self.exit_code if found.exit_code is None else found.exit_code),
        )


def subject(pods: Sequence[PodState]) -> str:
    """Return the pods in a few words: the name of the first one and how many others there are."""
    others = len(pods) - 1
    return pods[0].name + (f" and {others} other pod{'s' if others > 1 else ''}" if others > 0 else "")


def names(pods: Sequence[PodState]) -> list[str]:
    """Return the names of pods."""
    return [pod.name for pod in pods]


def pod_evidence(view: JobView, pod: PodState, path: str) -> Evidence:
    """Return reason and message of a pod as evidence. ``path`` is the field that they were read from."""
    text = f"{pod.reason}: {pod.message}" if pod.message else pod.reason
    return Evidence(f"pod {pod.name}", text, path, assigned_at(view, pod.name))


def event_evidence(event: Object) -> Evidence:
    """Return an event as evidence."""
    about = event.get("involvedObject") or {}
    text = f"{event.get('reason', '')}: {' '.join(str(event.get('message', '')).split())}"
    return Evidence(
        f"event of {about.get('kind', '')} {about.get('name', '')}", text, time=event_time(event, first=True)
    )


def assigned_at(view: JobView, name: str) -> float:
    """Return when a pod got its node, or when it was created if it has none; 0 if it does not exist."""
    pod = view.objects.get(name)
    if pod is None:
        return 0.0
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("lastTransitionTime"):
            return timestamp(condition["lastTransitionTime"])
    return timestamp(pod["metadata"].get("creationTimestamp"))


def waiting_path(container: str = CONTAINER) -> str:
    """Return the path of the field in which a pod says why a container waits."""
    return f"status.containerStatuses[{container}].state.waiting"
