"""Devices that pods claim (dynamic resource allocation): checks of the templates, and claims that are not fulfilled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Find, Trace, event_evidence, names, tell
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.health.scheduling import scheduler_says, unschedulable
from flk.observe.model import PodPhase
from flk.observe.pods import one_line
from flk.observe.view import JobView

_KINDS: Final = {"resourceclaimtemplates": "ResourceClaimTemplate", "resourceclaims": "ResourceClaim"}
_MISSING: Final = re.compile(r'resourceclaim(template)?(?:\.resource\.k8s\.io)? "([^"]+)" not found')
_CLASS_MISSING: Final = re.compile(r"device class (\S+) does not exist")


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the cluster knows claims of devices, and that the templates and claims that the pods name exist."""
    if not pods.device_claims:
        return
    served = cluster.devices
    if isinstance(served, Unreadable):
        if served.missing:
            remedy = served.remedy or "claims of devices need Kubernetes 1.34; leave out --claim"
            yield Result("devices", Level.FAILED, served.reason, remedy)
        else:
            yield Result("devices", Level.UNKNOWN, f"{served.reason}")
        return
    fine: list[str] = []
    for plural, name in pods.device_claims:
        kind, item = _KINDS[plural], cluster.named.get((plural, name))
        if not isinstance(item, Unreadable):
            fine.append(name)
        else:
            remedy = f"create it ({cluster.commands.kubectl('apply -f FILE')}), or correct --claim"
            missing, unread = f"there is no {kind} {name}", f"{kind} {name} cannot be read"
            yield item.result("devices", missing, remedy, "DeviceClaimMissing", unread=unread)
    if fine:
        yield Result("devices", Level.OK, f"claims exist: {', '.join(fine)}")


def _missing(view: JobView) -> Trace | None:
    """Find pods whose claim cannot be made, which no condition tells, or whose claim the scheduler does not find."""
    pods = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and not pod.reason]
    for pod in pods:
        for event in reversed(view.pod_events.get(pod.name, [])):
            match = _MISSING.search(one_line(event.get("message")))
            if match and event.get("reason") == "FailedResourceClaimCreation":
                return Trace(names(pods), [event_evidence(event)], (match[0], *match.groups("")))
    return scheduler_says(_MISSING)(view)


def _not_allocated(view: JobView) -> Trace | None:
    found = unschedulable(view)
    if found is None or found[1].kind != "claims":
        return None
    pods, reason, evidence = found
    return Trace(names(pods), evidence, (reason.text,))


def _kind(trace: Trace) -> str:
    return _KINDS["resourceclaimtemplates" if trace[1] else "resourceclaims"]


_FIND_MISSING: Final[Find] = tell(
    _missing,
    lambda view, trace: (
        f"{trace} cannot be scheduled: the {_kind(trace)} {trace[2]} does not exist in namespace {view.namespace}"
    ),
    lambda view, trace: (
        f"{view.kubectl(f'get {_kind(trace).lower()}s')} shows those that exist; create it, and the pods go on, or "
        "correct --claim and submit again"
    ),
)
CAUSES: Final = (
    Cause(
        "DeviceClaimMissing",
        _FIND_MISSING,
        grace=30,
    ),
    Cause(
        "DeviceClassMissing",
        tell(
            scheduler_says(_CLASS_MISSING),
            lambda view, trace: f"{trace}: the DeviceClass {trace[1]} does not exist, which a claim names",
            lambda view, trace: (
                f"{view.kubectl_of_cluster('get deviceclasses')} shows those that exist; install the driver of the "
                "devices, or correct the class in the template"
            ),
        ),
        grace=60,
    ),
    Cause(
        "NotEnoughDevices",
        tell(
            _not_allocated,
            lambda view, trace: f"{trace}: no node has the devices free that it claims ({trace[0]})",
            lambda view, trace: (
                f"{view.flk('wait')} waits for other jobs to end; {view.kubectl_of_cluster('get resourceslices')} "
                f"shows the devices of the nodes, and {view.kubectl('get resourceclaims')} who has them"
            ),
        ),
        grace=60,
        cured_by="other jobs that end",
    ),
)
