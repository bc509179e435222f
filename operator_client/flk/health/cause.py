"""Cause: one row of the table of causes, and Found: the result of its function for the objects of a job."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from flk.kube import Object
from flk.observe.model import Evidence, Finding, PodState
from flk.observe.observation import event_time, involved
from flk.observe.pods import conditions, one_line
from flk.observe.view import JobView
from flk.spec.units import short_duration, timestamp
from flk_runtime.contract import ExitCode
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.values import dataclass, field

_TEXTS: Final = Path(__file__).with_name("causes.yaml")


@dataclass(frozen=True)
class Found:
    """The result of the function of a cause. The fields mean the same as in Finding."""

    sentence: str
    remedy: str
    evidence: Sequence[Evidence]
    pods: Sequence[str] = ()
    since: float = 0.0  # 0: the time of the earliest evidence, else the creation of the job
    resolves_itself: bool | None = None  # None: as the table says
    exit_code: ExitCode | None = None  # None: as the table says
    grace: float | None = None  # None: as the table says
    may_last: bool = False  # whatever patience the table says


@dataclass(frozen=True)
class Match:
    """The match of a cause: the pods that it concerns, the evidence, and the words in the evidence that matter."""

    pods: Sequence[str]
    evidence: Sequence[Evidence]
    texts: Sequence[str] = ()
    since: float = 0.0  # 0: the time of the earliest evidence

    def __str__(self) -> str:
        """The pods in a few words: the name of the first one and how many others there are."""
        others = len(self.pods) - 1
        return self.pods[0] + (f" and {plural(others, 'other pod')}" if others > 0 else "")

    def __getitem__(self, number: int) -> str:
        return self.texts[number]

    def found(self, sentence: str, remedy: str, *more: Evidence, **fields: Any) -> Found:
        """Return this match as the result of a cause, with ``more`` evidence and further fields of Found."""
        return Found(sentence, remedy, [*self.evidence, *more], self.pods, **{"since": self.since, **fields})


Find = Callable[[JobView], Found | None]
Locate = Callable[[JobView], Match | None]
Tell = Callable[[JobView, Match], str]


def found_by(locate: Locate, describe: Callable[[JobView, Match], Found]) -> Find:
    """Return a Find that calls ``locate``, and has ``describe`` make the cause of a match."""

    def find(view: JobView) -> Found | None:
        match = locate(view)
        return None if match is None else describe(view, match)

    return find


def tell(locate: Locate, sentence: Tell, remedy: Tell) -> Find:
    """Return a Find that calls ``locate``, and describes a match as the cause by ``sentence`` and ``remedy``."""
    return found_by(locate, lambda view, match: match.found(sentence(view, match), remedy(view, match)))


@dataclass(frozen=True)
class Cause:
    """One cause: how it is found, and what follows from it. Its texts are in ``causes.yaml``, under its code."""

    code: str  # upper camel case, stable
    find: Find = field(repr=False)
    exit_code: ExitCode = ExitCode.INFRASTRUCTURE
    grace: float = 0.0  # seconds before it counts as stuck, so that people or controllers can still act
    cured_by: str = ""  # what may resolve it without a change to the job, as a noun; empty: nothing does
    # Seconds after which it counts as stuck although it may resolve, where something says when it began; None: it may
    # last.
    patience: float | None = None
    awaits: str = ""  # whom the job waits for, as a noun; empty: nobody but its own ranks and the user
    goes_on: bool = False  # the ranks of the job run meanwhile
    from_outside: bool = False  # it ends pods of the job from outside
    explained_by: Literal["", "any", "same pod"] = ""  # of an end: which causes explain it better than it does itself

    @property
    def title(self) -> str:
        """What has happened, in one line without a full stop."""
        return _texts()[self.code]["title"]

    @property
    def meaning(self) -> str:
        """What that means for the job, and where flk reads it."""
        return _texts()[self.code]["meaning"]

    @property
    def remedy(self) -> str:
        """What to do, for the page of the cause. A finding has a remedy of its own, with the values of the job."""
        return _texts()[self.code]["remedy"]

    @property
    def stuck(self) -> str:
        """When a job that waits is Stuck, for the page of the waits."""
        if text := _texts()[self.code].get("stuck"):
            return text
        if self.cured_by and self.patience is None:
            return f"no limit: it waits for {self.cured_by}"
        return f"after {short_duration(self.patience or self.grace)}"

    def finding(self, view: JobView) -> Finding | None:
        """Return the finding of this cause in the objects of a job, None if the job does not have this cause."""
        found = self.find(view)
        if found is None:
            return None
        times = [item.time for item in found.evidence if item.time]
        itself = bool(self.cured_by) if found.resolves_itself is None else found.resolves_itself
        return Finding(
            code=self.code,
            sentence=found.sentence,
            remedy=found.remedy,
            evidence=list(found.evidence),
            pods=list(found.pods),
            since=found.since or min(times, default=view.created),
            resolves_itself=itself,
            grace=self.grace if found.grace is None else found.grace,
            stuck_after=None if found.may_last or not (found.since or times) else self.patience,
            exit_code=int(self.exit_code if found.exit_code is None else found.exit_code),
        )


def page(cause: Cause) -> str:
    """Return what a cause means, whether it resolves by itself, and what to do, as plain text."""
    if cause.cured_by:
        most = f", at most {short_duration(cause.patience)}" if cause.patience else ""
        resolves = f"It may resolve by itself, through {cause.cured_by}; `flk wait` waits{most}."
    elif cause.grace:
        resolves = (
            f"It does not resolve by itself: after {short_duration(cause.grace)} the job is Stuck, and `flk wait` "
            f"ends with exit code {int(cause.exit_code)}."
        )
    else:
        resolves = (
            f"`flk wait` ends with exit code {int(cause.exit_code)}, or with the code that the failure itself has."
        )
    return f"{cause.code}: {cause.title}.\n\n{cause.meaning}\n\n{resolves}\n\nWhat to do: {cause.remedy}"


@functools.cache
def _texts() -> Mapping[str, Mapping[str, str]]:
    """Return the texts of all causes, by their codes."""
    import yaml  # for `flk explain` and reports only

    texts: Mapping[str, Mapping[str, str]] = yaml.safe_load(_TEXTS.read_text(encoding="utf-8"))
    return texts


def match_of(view: JobView, pods: Sequence[PodState], path: str, *texts: str) -> Match:
    """Return the match of pods whose reason and message show a cause. These were read from the field ``path``."""
    return Match(names(pods), [pod_evidence(view, pods[0], path)], texts)


def waiting(reasons: Sequence[str], pattern: str = ".*") -> Locate:
    """Return a Locate for pods whose container waits with one of ``reasons`` and a message that matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        pods = [pod for pod in view.pods if pod.stuck and pod.reason in reasons and re.search(pattern, pod.message)]
        match = re.search(pattern, pods[0].message) if pods else None
        return match_of(view, pods, container_path(view), match[0], *match.groups("")) if match else None

    return locate


def names(pods: Sequence[PodState]) -> list[str]:
    """Return the names of pods."""
    return [pod.name for pod in pods]


def subject(pods: Sequence[PodState]) -> str:
    """Return the pods in a few words: the name of the first one and how many others there are."""
    return str(Match(names(pods), []))


def condition_evidence(source: str, condition: Object, text: str = "") -> Evidence:
    """Return a condition of an object as evidence; ``text`` is its message where nothing else is given."""
    time = timestamp(condition.get("lastTransitionTime"))
    return Evidence(source, text or one_line(condition.get("message")), f"status.conditions[{condition['type']}]", time)


def changed_at(thing: Object) -> float:
    """Return when somebody changed an object last, in seconds since the epoch; 0 if it does not say."""
    return max((timestamp(entry.get("time")) for entry in thing["metadata"].get("managedFields") or []), default=0.0)


def pod_evidence(view: JobView, pod: PodState, path: str) -> Evidence:
    """Return reason and message of a pod as evidence. ``path`` is the field that they were read from."""
    text = f"{pod.reason}: {pod.message}" if pod.message else pod.reason
    return Evidence(f"pod {pod.name}", text, path, first_said(view, pod) or assigned_at(view, pod.name))


def first_said(view: JobView, pod: PodState) -> float:
    """Return when an event first had the message of a pod, in seconds since the epoch; 0 if none has it."""
    said = [
        event for event in view.events_of(pod.name) if pod.message and pod.message in one_line(event.get("message"))
    ]
    return min((event_time(event, first=True) for event in said), default=0.0)


def event_evidence(event: Object) -> Evidence:
    """Return an event as evidence."""
    about = involved(event)
    text = f"{event.get('reason', '')}: {one_line(event.get('message'))}"
    return Evidence(
        f"event of {about.get('kind', '')} {about.get('name', '')}", text, time=event_time(event, first=True)
    )


def assigned_at(view: JobView, name: str) -> float:
    """Return when a pod got its node, or when it was created if it has none; 0 if it does not exist."""
    pod = view.objects.get(name)
    if pod is None:
        return 0.0
    scheduled = conditions(pod).get("PodScheduled") or {}
    return timestamp(scheduled.get("lastTransitionTime") or pod["metadata"].get("creationTimestamp"))


def container_path(view: JobView, state: str = "state.waiting") -> str:
    """Return the path of a state of the training container in its pod: by default, why the container waits."""
    return f"status.containerStatuses[{view.target.container}].{state}"
