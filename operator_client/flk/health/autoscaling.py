"""Autoscalers: controllers that add nodes for pods that no node can take, and what they say about the pods of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flk.health.cause import Cause, Found, assigned_at, event_evidence, names, subject
from flk.kube import Object
from flk.observe.model import Evidence, Finding, PodState
from flk.observe.observation import event_time
from flk.observe.pods import one_line
from flk.observe.view import JobView

_ADDS: Final = ("TriggeredScaleUp", "Nominated")  # of cluster-autoscaler and Karpenter
_REFUSES: Final = ("NotTriggerScaleUp", "FailedScaleUp", "FailedScheduling")
# The scheduler sends events with the reason FailedScheduling too, without these words.
_KARPENTER_REFUSES: Final = re.compile(r"^Failed to schedule pod\b")
_BEGINNING: Final = re.compile(r"^(pod (?:triggered|didn't trigger) scale-up|Failed to schedule pod)[:,]? *")
# A node group suits the pods, and cannot grow now.
_LATER: Final = re.compile(
    r"in backoff after failed scale-up|max node group size reached|max cluster .*limit reached"
    r"|exceed(?:s|ed)? limits?\b|out of resources|insufficient ?capacity|quota",
    re.IGNORECASE,
)
SILENCE: Final = 300.0  # seconds in which the autoscaler of a cloud should have said something about a pod
# Annotations of pods whose nodes a ProvisioningRequest makes, as in GKE's flex-start; the second one is older.
_CONSUMES: Final = tuple(
    f"{group}/consume-provisioning-request" for group in ("autoscaling.x-k8s.io", "cluster-autoscaler.kubernetes.io")
)
_CLOUDS: Final = {"aws": "AWS", "azure": "Azure", "gce": "Google Cloud"}  # by the scheme of a node's providerID


@dataclass(frozen=True)
class Said:
    """What an autoscaler says last about the pods of a job that have no node."""

    pods: Sequence[PodState]
    event: Object
    adds: bool  # whether it adds a node for them
    since: float  # when it first said so, in seconds since the epoch

    @property
    def who(self) -> str:
        """Name of the autoscaler, as its events have it."""
        return source_of(self.event) or "an autoscaler"

    @property
    def text(self) -> str:
        """What it says, without the words that all of its events begin with."""
        return _BEGINNING.sub("", one_line(self.event.get("message"))).rstrip(".")


def source_of(event: Object) -> str:
    """Return the name of the program that sent an event."""
    return str((event.get("source") or {}).get("component") or event.get("reportingComponent") or "")


def answer(view: JobView) -> Said | None:
    """Return what an autoscaler says last about the job's pods without a node; None where none says anything."""
    pods = view.unschedulable
    said = [event for pod in pods for event in view.events_of(pod.name) if _adds(event) or _refuses(event)]
    if not said:
        return None
    said.sort(key=event_time)
    refused = max((event_time(event) for event in said if _refuses(event)), default=0.0)
    same = [e for e in said if _adds(e) == _adds(said[-1]) and (_refuses(e) or event_time(e) >= refused)]
    return Said(pods, said[-1], _adds(said[-1]), min(event_time(event, first=True) for event in same))


def refusal(view: JobView) -> list[Evidence]:
    """Return the event of an autoscaler that adds no node for the pods, as evidence; empty where there is none."""
    found = answer(view)
    return [event_evidence(found.event)] if found and not found.adds else []


def is_adding(view: JobView) -> bool:
    """Return whether an autoscaler adds a node for the job's pods."""
    found = answer(view)
    return found is not None and found.adds


def of_cluster(nodes: Sequence[Object], karpenter: bool, status: bool) -> str:
    """Return who may add nodes to a cluster; empty if nothing says that anybody does.

    ``karpenter`` and ``status`` say whether the cluster has Karpenter's API, and the ConfigMap in which
    cluster-autoscaler keeps its status.
    """
    if karpenter:
        return "Karpenter"
    if status:
        return "cluster-autoscaler"
    clouds = {str((node.get("spec") or {}).get("providerID") or "").partition("://")[0] for node in nodes}
    return next((name for scheme, name in _CLOUDS.items() if scheme in clouds), "")


def with_patience(view: JobView, finding: Finding) -> Finding:
    """Return the finding that no node can take pods, with more time where a cloud's autoscaler has not spoken yet."""
    nodes = view.seen.nodes
    cloud = of_cluster([*nodes.values()], karpenter=False, status=False)
    if not cloud or finding.resolves_itself or answer(view) is not None:
        return finding
    made = next(node for node in nodes.values() if (node.get("spec") or {}).get("providerID"))
    text = f"{made['spec']['providerID']}: an autoscaler of {cloud} may add a node, and has said nothing yet"
    evidence = Evidence(f"node {made['metadata']['name']}", text, "spec.providerID")
    return replace(finding, grace=max(finding.grace, SILENCE), evidence=[*finding.evidence, evidence])


def _adds(event: Object) -> bool:
    return event.get("reason") in _ADDS


def _refuses(event: Object) -> bool:
    of_scheduler = event.get("reason") == "FailedScheduling" and not _KARPENTER_REFUSES.match(str(event.get("message")))
    return event.get("reason") in _REFUSES and not of_scheduler


def _node_being_added(view: JobView) -> Found | None:
    found = answer(view)
    if found is None or not found.adds:
        return None
    return Found(
        f"{subject(found.pods)}: no node can take it yet, and {found.who} adds one ({found.text})",
        f"{view.flk('wait')} waits; {view.kubectl_of_cluster('get nodes --watch')} shows the nodes as they come",
        [event_evidence(found.event)],
        names(found.pods),
        since=found.since,
    )


def _node_not_added_now(view: JobView) -> Found | None:
    found = answer(view)
    if found is None or found.adds or not _LATER.search(found.text):
        return None
    return Found(
        f"{subject(found.pods)}: no node can take it, and {found.who} can add none now ({found.text})",
        f"{view.flk('wait')} waits for other jobs to end or for the autoscaler to try again; the administrator of the "
        "cluster can raise the limit that is named",
        [event_evidence(found.event)],
        names(found.pods),
        since=found.since,
    )


def _provisioning_requested(view: JobView) -> Found | None:
    pods = view.unschedulable
    metadata = [view.objects[pod.name]["metadata"].get("annotations") or {} for pod in pods]
    found = next(((key, notes[key]) for notes in metadata for key in _CONSUMES if notes.get(key)), None)
    if found is None:
        return None
    field, name = found
    return Found(
        f"{subject(pods)}: no node can take it yet, and ProvisioningRequest {name} makes its nodes",
        f"{view.kubectl(f'describe provisioningrequest {name}')} shows how far it is; {view.flk('wait')} waits",
        [Evidence(f"pod {pods[0].name}", str(name), f"metadata.annotations[{field}]", assigned_at(view, pods[0].name))],
        names(pods),
    )


_READ: Final = "flk reads the events of cluster-autoscaler and Karpenter about the pods"
CAUSES: Final = (
    Cause(
        "NodeBeingAdded",
        _node_being_added,
        cured_by="the autoscaler",
    ),
    Cause(
        "NodeNotAddedNow",
        _node_not_added_now,
        cured_by="other jobs that end, or the autoscaler",
    ),
    Cause(
        "ProvisioningRequested",
        _provisioning_requested,
        cured_by="the ProvisioningRequest",
    ),
)
