"""Admission of pods by the API server: what it says to a pod that it only checks, and pods of a job that it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Find, Found, Locate, Match, Tell, event_evidence, found_by, tell
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable, amount_text, quantity
from flk.observe.model import PodPhase
from flk.observe.pods import one_line
from flk.observe.view import SERVICE_REFUSED, JobView
from flk_runtime.contract.quantities import plural

EXCEEDED: Final = "QuotaExceeded"
_QUOTA: Final = r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+?),?(?:\s|$)"
_WEBHOOKS: Final = "validatingwebhookconfigurations,mutatingwebhookconfigurations"
_WEBHOOK_DOWN: Final = r'failed calling webhook "([^"]+)": (.*)'
REFUSED: Final = "PodRefused"
_ANY: Final = r"(?:.*?(?:is forbidden|is invalid): )?(.+)"


def _refusal(pattern: str) -> Locate:
    """Return a Locate for the last refusal whose message matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        for event in reversed(view.refusals):
            match = re.search(pattern, one_line(event.get("message")))
            if match:
                absent = [
                    pod.name for pod in view.pods if pod.phase == PodPhase.MISSING or event in view.refused_services
                ]
                return Match(absent, [event_evidence(event)], (match[0], *match.groups("")))
        return None

    return locate


def _refused(pattern: str, sentence: Tell, remedy: Tell) -> Find:
    """Return a Find for a cause of refusals whose message matches ``pattern``."""
    return tell(_refusal(pattern), lambda view, match: f"{_not_created(view, match)}: {sentence(view, match)}", remedy)


def _not_created(view: JobView, match: Match) -> str:
    """Return the beginning of a sentence that says how many pods are refused, or that a service of theirs is."""
    if match.evidence[0].text.startswith(SERVICE_REFUSED):
        return "a service by which the pods find each other cannot be created"
    return f"{plural(len(match.pods), 'pod')} of {len(view.pods)} cannot be created"


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Report what the API server says about a pod of the job, by its quotas, policies and webhooks."""
    refusal = cluster.admission.reason if isinstance(cluster.admission, Unreadable) else ""
    if cluster.admission is None or lacks_dry_run(refusal):
        why = refusal or "you may not create pods"
        found = f"whether Pod Security, policies and webhooks would admit the pods was not checked: {why}"
        yield Result("admission", Level.UNKNOWN, found)
    elif not refusal:
        yield Result("admission", Level.OK, "the API server would admit a pod of the job")
    elif (quota := re.search(_QUOTA, refusal)) and (over := _never(quota[1], quota[2], quota[4], 1)):
        found = f"the API server refuses each pod of the job: {over}"
        yield Result("admission", Level.FAILED, found, "ask for less, or have the quota raised", EXCEEDED)
    elif quota:
        found = f"the API server refuses a pod of the job now: {refusal}"
        yield Result("admission", Level.WARNING, found, "the job waits until the quota has room", EXCEEDED)
    else:
        found = f"the API server refuses a pod of the job: {refusal}"
        remedy = "the message names the policy or the object; `flk render` shows the manifest"
        yield Result("admission", Level.FAILED, found, remedy, REFUSED)


def lacks_dry_run(message: str) -> bool:
    """Whether the API server says that a webhook supports no dry run, so that each one is refused."""
    return "does not support dry run" in message


def _never(quota: str, requested: str, limited: str, pods: int) -> str:
    """Return what ``pods`` of such a request need that a quota never has; empty if it may have room for them."""
    limits = dict(part.split("=", 1) for part in limited.split(",") if "=" in part)
    for key, each in (part.split("=", 1) for part in requested.split(",") if "=" in part):
        needed = quantity(each) * pods
        if key in limits and needed > quantity(limits[key]):
            return (
                f"the job needs {amount_text(key, needed)} {key}, and quota {quota} has {limits[key]} in all: it can "
                "never run"
            )
    return ""


def _exceeded(view: JobView, match: Match) -> Found:
    _, quota, requested, used, limited = match.texts
    shown = view.kubectl(f"describe resourcequota {quota}")
    alike = view.sizes[0] if len(view.roles) == 1 else 1  # fewer cannot train; pods of another role may ask for less
    if over := _never(quota, requested, limited, alike):
        remedy = f"ask for less, or have the quota raised; {shown} shows it"
        return match.found(f"{_not_created(view, match)}: {over}", remedy, resolves_itself=False)
    return match.found(
        f"{_not_created(view, match)}: the namespace's quota {quota} is used up ({requested} requested, {used} of "
        f"{limited} used)",
        f"{shown} shows who uses it; delete jobs that have ended with {view.flk('list', job='')}, ask for less, or "
        "have the quota raised",
    )


CAUSES: Final = (
    Cause(
        EXCEEDED,
        found_by(_refusal(_QUOTA), _exceeded),
        grace=60,
        cured_by="other jobs that end",
        awaits="the quota of the namespace",
    ),
    Cause(
        "WebhookUnavailable",
        _refused(
            _WEBHOOK_DOWN,
            lambda view, match: f"the admission webhook {match[1]} does not answer ({match[2]})",
            lambda view, match: (
                f"{view.kubectl_of_cluster(f'get {_WEBHOOKS} -o wide')} names its service; have it repaired"
            ),
        ),
        grace=120,
        awaits="an admission webhook: away, or with a certificate that is not valid",
    ),
    Cause(
        REFUSED,
        _refused(
            _ANY,
            lambda view, match: match[1],
            lambda view, match: (
                "change what the API server refuses; "
                f"{view.kubectl(f'describe {view.kind.lower()} {view.name}')} shows all events"
            ),
        ),
        grace=30,
        awaits="whoever refuses the pods: Pod Security, a policy, the operator's rights",
    ),
)
