"""Refusals of the API server: the events of pods that could not be created, which several subjects read."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Find, Locate, Tell, Trace, event_evidence, tell
from flk.observe.model import PodPhase
from flk.observe.pods import one_line
from flk.observe.view import SERVICE_REFUSED, JobView
from flk_runtime.contract.ranges import plural

READ: Final = "flk reads the event FailedCreatePod, FailedCreate or FailedCreateService of the job."


def refusal(pattern: re.Pattern[str]) -> Locate:
    """Return a Locate for the last refusal whose message matches ``pattern``."""

    def locate(view: JobView) -> Trace | None:
        for event in reversed(view.refusals):
            match = pattern.search(one_line(event.get("message")))
            if match:
                absent = [
                    pod.name for pod in view.pods if pod.phase == PodPhase.MISSING or event in view.refused_services
                ]
                return Trace(absent, [event_evidence(event)], (match[0], *match.groups("")))
        return None

    return locate


def refused(pattern: re.Pattern[str], sentence: Tell, remedy: Tell) -> Find:
    """Return a Find for a cause of refusals whose message matches ``pattern``."""
    return tell(refusal(pattern), lambda view, trace: f"{not_created(view, trace)}: {sentence(view, trace)}", remedy)


def not_created(view: JobView, trace: Trace) -> str:
    """Return the beginning of a sentence that says how many pods are refused, or that a service of theirs is."""
    if trace.evidence[0].text.startswith(SERVICE_REFUSED):
        return "a service by which the pods find each other cannot be created"
    return f"{plural(len(trace.pods), 'pod')} of {len(view.pods)} cannot be created"
