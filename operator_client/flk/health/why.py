"""Diagnosis: the answer of `flk why`: the cause, why other findings are not the cause, and the examined objects."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from flk.health.cause import subject
from flk.health.table import ENDS, LATER, find
from flk.kube import Object
from flk.observe.model import Evidence, Finding, PodState
from flk.observe.observation import event_time, involved
from flk.observe.pods import one_line
from flk.observe.view import JobView
from flk_runtime.contract.quantities import numbered, plural
from flk_runtime.contract.values import asdict, dataclass, field, replace

SCHEMA: Final = "flk.dev/why/v1"  # of the JSON that `flk why -o json` prints
OTHERS: Final = 12  # other observations that are told; the rest is counted
SAME: Final = 40  # characters at the end of two texts from which on they may say the same
_LONG: Final = 0.3  # share of the time from which on a wait for data is told
_RECORD: Final = "record of the launchers"
_ENDED: Final = "a consequence: the operator says how a container ended, and the record of its launcher or its log why"
# Why events of these reasons are no cause.
_HARMLESS: Final = {
    "SetPodTemplateRestartPolicy": "harmless: the operator sets the restart policy of the pods itself",
    "DNSConfigForming": "harmless: the node shortens the list of search domains",
    **dict.fromkeys(
        ("PyTorchJobRestarting", "PyTorchJobFailed", "PyTorchJobSuspended"),
        "a consequence: the operator says what it does about it",
    ),
}
_REPEATING: Final = (
    "BackOff",
    "CrashLoopBackOff",
    "ErrImagePull",
    "Error",
    "ExitedWithCode",
    "Failed",
    "FailedCreatePod",
    "FailedCreateService",
    "FailedMount",
    "FailedScheduling",
    "ImagePullBackOff",
    "InspectFailed",
    "StartError",
    "Unschedulable",
)


HAPPENED_LATER: Final = "it happened later: the cause above kept the job from running"


@dataclass(frozen=True)
class Other:
    """Something else that was found, and why it is not the cause."""

    text: str
    why_not: str
    count: int = 1
    code: str = ""  # of a cause of the table; empty for an event or the end of a pod
    time: float = 0.0  # seconds since the epoch; 0 if unknown


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `flk why` about a job."""

    job: str
    namespace: str
    cause: Finding | None  # None: nothing is wrong, or the cause is unknown
    summary: str  # one sentence: the cause, that nothing is wrong, or that the cause is unknown
    known: bool  # whether the cause is known, or nothing is wrong
    stuck: bool = False  # the job does not go on by itself
    as_of: float | None = None  # when flk said so last, in seconds since the epoch; None: now
    others: list[Other] = field(default_factory=list)
    examined: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `-o json`, with the version of its schema."""
        data = asdict(self)
        if self.cause:
            data["cause"]["evidence"] = [asdict(item) | {"where": item.where} for item in self.cause.evidence]
        return {"schema": SCHEMA, "code": self.cause.code if self.cause else "", **data}


def diagnose(view: JobView) -> Diagnosis:
    """Return the cause of a job's state, and everything else that was found."""
    found = find(view)
    cause = found[0] if found else None
    summary, known = _summary(view, cause)
    earlier = _earlier(view)
    same = earlier.pop(cause.sentence, []) if cause else []
    more = [Evidence(_RECORD, f"{numbered('attempt', same)} ended in the same way")] if same else []
    return Diagnosis(
        job=view.name,
        namespace=view.namespace,
        cause=replace(cause, evidence=[*_distinct(cause.evidence), *more]) if cause else None,
        summary=summary,
        known=known,
        stuck=bool(cause and not view.failed and cause.is_stuck(view.now)),
        others=_limited(
            view,
            [
                *_other_findings(view, found),
                *_attempts(earlier),
                *_quarantine(view),
                *_ends(view, cause),
                *_events(view, cause),
            ],
        ),
        examined=examined(view),
    )


def examined(view: JobView) -> list[str]:
    """Return a list of the objects that were read of a job, for the case that no cause was found."""
    conditions = ", ".join(view.conditions) or "none"
    counts: dict[str, int] = {}
    for pod in view.pods:
        counts[str(pod.phase)] = counts.get(str(pod.phase), 0) + 1
    phases = ", ".join(f"{count} {phase}" for phase, count in counts.items())
    lines = [f"{view.subject}: conditions {conditions}", f"{plural(len(view.pods), 'pod')}: {phases}"]
    lines.append(f"{plural(len(view.events), 'event')} of the job and of its pods that do not run")
    attempts = len(view.record.attempts) if view.record else 0
    lines.append(f"{_RECORD}: {plural(attempts, 'attempt') if view.record else 'none'}")
    around = view.seen
    for things, noun in (
        (around.logs, "log"),
        (around.nodes, "node"),
        (around.claims, "PersistentVolumeClaim"),
        (around.workloads, "Workload"),
        (around.pod_groups, "PodGroup"),
    ):
        if things:
            lines.append(plural(len(things), noun))
    lines += [f"{name}: you have no permission to read them" for name in sorted(around.unreadable)]
    return lines


def _distinct(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Return the evidence without what repeats another piece, as an event that says the same as its pod."""
    found: list[Evidence] = []
    for item in evidence:
        for number, other in enumerate(found):
            pairs = zip(reversed(item.text), reversed(other.text), strict=False)
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if same >= max(SAME, min(len(item.text), len(other.text)) // 2):
                if len(item.text) > len(other.text):
                    found[number] = item
                break
        else:
            found.append(item)
    return found


def _summary(view: JobView, cause: Finding | None) -> tuple[str, bool]:
    if cause:
        return cause.sentence, True
    if view.succeeded and not view.failed:
        return "the job has succeeded", True
    ready = sum(pod.is_up for pod in view.pods)
    if view.deletion_began:
        return f"the job is being deleted{view.seen.kept_by_finalizers}", True
    if ready == len(view.pods) and view.slow:
        slow = "; ".join(rank.summary for rank in view.slow)
        return f"{plural(ready, 'pod')} of {len(view.pods)} run, and the others wait: {slow}", True
    if ready == len(view.pods) and not view.from_flk:
        return (
            f"{plural(ready, 'pod')} of {len(view.pods)} run, without a launcher that tells whether their ranks make "
            f"progress: {view.flk('stacks')} shows what they do"
        ), True
    if ready == len(view.pods):
        waiting = [progress for progress in view.seen.progress if (progress.data_wait or 0.0) >= _LONG]
        waits = f"; rank {waiting[0].rank} waits for data {waiting[0].data_wait:.0%} of the time" if waiting else ""
        return f"nothing is wrong: {plural(ready, 'pod')} of {len(view.pods)} run{waits}", True
    if not view.pods or view.now - view.created < 60:
        return f"nothing is wrong yet: {ready} of {len(view.pods)} pods run, and the others are starting", True
    return f"unknown: {ready} of {len(view.pods)} pods run, and nothing that flk has read says why", False


def _other_findings(view: JobView, found: list[Finding]) -> list[Other]:
    others = []
    for finding in found[1:]:
        if finding.code in LATER:
            why_not = HAPPENED_LATER
        elif view.failed and finding.code in ENDS:
            why_not = "it is a consequence of the cause"
        elif view.failed:
            why_not = "it did not end the job"
        elif finding.resolves_itself and not found[0].resolves_itself:
            why_not = "it resolves by itself"
        elif set(finding.pods) & set(found[0].pods):
            why_not = "it is a consequence of the cause, in the same pod"
        else:
            why_not = "it stands in the way too; the cause above comes first"
        others.append(Other(finding.sentence, why_not, code=finding.code, time=finding.since))
    return others


def _earlier(view: JobView) -> dict[str, list[int]]:
    """Return the numbers of the attempts before the one that ended the job, by what ended them."""
    history = view.record.attempts if view.record else []
    earlier = [attempt for attempt in history if attempt.failure]
    if view.failed:
        earlier = earlier[:-1]
    folded: dict[str, list[int]] = {}
    for attempt in earlier:
        if attempt.failure:
            folded.setdefault(attempt.failure.summary, []).append(attempt.number + 1)
    return folded


def _attempts(earlier: dict[str, list[int]]) -> list[Other]:
    """Return what ended earlier attempts, of each cause once."""
    why_not = "it ended an earlier attempt, and another attempt followed"
    return [Other(f"{text} ({numbered('attempt', numbers)})", why_not) for text, numbers in earlier.items()]


def _quarantine(view: JobView) -> list[Other]:
    """Return the nodes that the job's pods avoid."""
    return [
        Other(
            f"node {each.node} is in quarantine: {each.reason or 'pods have failed there repeatedly'}",
            f"spares take the places of its pods; {view.again(f'--avoid-node {each.node}')} has all pods avoid it",
        )
        for each in view.quarantine
    ]


def _ends(view: JobView, cause: Finding | None) -> list[Other]:
    """Return how other pods ended, equal ends together."""
    named = set(cause.pods) if cause else set()
    folded: dict[str, list[PodState]] = {}
    for pod in view.pods:
        if pod.exit_code not in (None, 0) and pod.name not in named:
            folded.setdefault(f"exit code {pod.exit_code}", []).append(pod)
    why_not = "a consequence: they ended after the pod of the cause"
    if view.records:
        why_not = "the launchers end with the code of the cause"
    return [
        Other(f"{subject(pods)} ended with {text}", why_not, time=pods[0].ended or 0.0) for text, pods in folded.items()
    ]


def _events(view: JobView, cause: Finding | None) -> list[Other]:
    """Return the warnings that neither are evidence of the cause nor repeat it, equal ones together."""
    used = {item.text for item in cause.evidence} if cause else set()
    states = {pod.name: pod for pod in view.pods}
    folded: dict[tuple[str, str], tuple[Object, int]] = {}
    for event in view.events:
        text = one_line(event.get("message"))
        reason = str(event.get("reason", ""))
        if event.get("type") != "Warning" or f"{reason}: {text}" in used:
            continue
        key = reason, re.sub(r"\d+", "", text)[:80]
        folded[key] = event, int(event.get("count") or 1) + (folded[key][1] if key in folded else 0)
    others = []
    for (reason, _), (event, count) in folded.items():
        about, message = involved(event), one_line(event.get("message"))
        # The operator repeats the record that a launcher has left, or the last lines of a log, in full.
        text, _, left = message.partition(" terminated message: ")
        why_not = _ENDED if left else _why_not(reason, states.get(str(about.get("name"))), view, cause)
        has_log = any(not pod.absent and pod.name in text.split() for pod in view.pods)
        said = text if has_log or left.startswith("{") else message
        said = f"event of {about.get('kind', '')} {about.get('name', '')}: {reason}: {said}"
        others.append(Other(said, why_not, count, time=event_time(event)))
    return sorted((other for other in others if other.why_not), key=lambda other: other.time)


def _why_not(reason: str, pod: PodState | None, view: JobView, cause: Finding | None) -> str:
    """Return why an event of this reason is not the cause; empty: it repeats the cause."""
    if reason in _HARMLESS:
        return _HARMLESS[reason]
    if reason == "FailedScheduling" and pod is not None and pod.node:
        return f"resolved: the pod has node {pod.node} since"
    if reason in ("FailedMount", "FailedAttachVolume") and pod is not None and (pod.started or pod.ended):
        return "resolved: the volumes were mounted after it"
    if reason.startswith("FailedCreate") and not any(p.absent for p in view.pods) and not view.refusals:
        return "resolved: all pods exist now"
    alike = {each.phase for each in view.pods if cause and each.name in cause.pods}
    repeats = cause is not None and reason in _REPEATING and (pod is None or not alike or pod.phase in alike)
    return "" if repeats else "flk does not know this event as a cause"


def _limited(view: JobView, others: Iterable[Other]) -> list[Other]:
    every = list(others)
    if len(every) <= OTHERS:
        return every
    left = sum(other.count for other in every[OTHERS:])
    return [*every[:OTHERS], Other(f"{plural(left, 'further event')}", f"{view.kubectl('get events')} shows them")]
