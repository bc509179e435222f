"""Gangs: pods that the scheduler starts together or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Found, condition_evidence, names, pod_evidence
from flk.health.cluster import Cluster, Level, Result, Unreadable
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase
from flk.observe.pods import conditions
from flk.observe.view import JobView
from flk.targets.gang import GANGS


def before(cluster: Cluster) -> Iterator[Result]:
    """Check that the cluster serves the PodGroups of the job's gang scheduler: they come with the scheduler."""
    gang, api = cluster.gang, cluster.gang_api
    if gang is None or api is None:
        return
    if not isinstance(api, Unreadable):
        yield Result("gang", Level.OK, f"the cluster serves PodGroups ({api.api_version})")
    else:
        name = next(name for name, each in GANGS.items() if each is gang)
        unread = f"the API {gang.api_version} cannot be read"
        yield api.result("gang", f"gang {name}: {api.reason}", api.remedy, unread=unread)


def _unscheduled(group: Object) -> Object:
    """Return the condition of a PodGroup that says that its pods do not fit; empty if there is none."""
    # Volcano's, and Kubernetes' own of 1.37 and of 1.36.
    known = {"Unschedulable": "True", "PodGroupInitiallyScheduled": "False", "PodGroupScheduled": "False"}
    said = conditions(group)
    return next((said[kind] for kind, status in known.items() if (said.get(kind) or {}).get("status") == status), {})


def _waiting_for_gang(view: JobView) -> Found | None:
    waiting = [pod for pod in view.pods if pod.phase in (PodPhase.MISSING, PodPhase.PENDING)]
    for group in view.seen.pod_groups if waiting else ():
        phase = str((group.get("status") or {}).get("phase") or "")
        unscheduled = _unscheduled(group)
        if phase in ("Pending", "Inqueue", "Unknown") or unscheduled:
            name = f"PodGroup {group['metadata']['name']}"
            message = str(unscheduled.get("message") or f"its pod group is {phase}")
            spec = group.get("spec") or {}
            gang = (spec.get("schedulingPolicy") or {}).get("gang") or {}
            need = spec.get("minMember") or gang.get("minCount")
            # The scheduler says of each pod but one that it waits for the group, and of that one what is missing.
            unfit = next((pod for pod in waiting if pod.message.partition("/")[0].isdigit()), None)
            lacks = f": {unfit.message.partition('. ')[0]}" if unfit else f": {message}"
            return Found(
                f"the scheduler starts {need} pods together or none, and there is no room for all{lacks}",
                f"{view.kubectl(f'describe podgroup {view.name}')} shows what is missing",
                [
                    condition_evidence(name, unscheduled, message)
                    if unscheduled
                    else Evidence(name, message, "status.phase"),
                    *([pod_evidence(view, unfit, "status.conditions[PodScheduled]")] if unfit else []),
                ],
                names(waiting),
            )
    return None


CAUSES: Final = (
    Cause(
        "WaitingForGang",
        _waiting_for_gang,
        cured_by="other jobs that end",
    ),
)
