"""Nodes: pods that have lost their node, nodes that report a fault, and pods that were ended from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from flk.health.cause import Cause, Found, condition_evidence, event_evidence, names, subject
from flk.health.cluster import FAULT_TAINT, taint_text
from flk.health.ending import job_failure
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.needs import suspects
from flk.observe.observation import involved
from flk.observe.pods import after_last, conditions, one_line
from flk.observe.view import JobView
from flk.spec.units import timestamp


def _disrupted(view: JobView, reasons: tuple[str, ...]) -> list[tuple[str, Object]]:
    """Return name and condition of pods, also replaced ones, that were ended from outside for one of these reasons."""
    found = []
    for name, pod in [*view.objects.items(), *view.replaced_pods.items()]:
        condition = conditions(pod).get("DisruptionTarget") or {}
        if condition.get("status") == "True" and condition.get("reason") in reasons:
            found.append((name, condition))
    return found


def _disruption(name: str, condition: Object) -> Evidence:
    return condition_evidence(f"pod {name}", condition, f"{condition.get('reason')}: {condition.get('message', '')}")


def _running_again(view: JobView) -> bool:
    return all(pod.is_up for pod in view.pods)


def _preempted(view: JobView) -> Found | None:
    if _running_again(view):
        return None
    hit = _disrupted(view, ("PreemptionByScheduler",))
    lately = [event for events in view.pod_events.values() for event in after_last(events, ("Started",))]
    events = [event for event in lately if event.get("reason") == "Preempted"]
    if not hit and not events:
        return None
    if hit:
        name, evidence = hit[0][0], [_disruption(*hit[0])]
    else:
        name, evidence = str(involved(events[-1]).get("name")), [event_evidence(events[-1])]
    return Found(
        f"{name} was preempted: the scheduler gave its place to a pod of higher priority",
        f"{view.flk('wait')} waits until there is room again; a higher priority class or --checkpoint loses less",
        evidence,
        [pod for pod, _ in hit] or [name],
    )


def _evicted(view: JobView) -> Found | None:
    if _running_again(view):
        return None
    hit = _disrupted(view, ("TerminationByKubelet", "EvictionByEvictionAPI", "DeletionByDeviceTaintManager"))
    pods = [pod for pod in view.pods if pod.reason == "Evicted"]
    if pods:
        pod = pods[0]
        status = view.objects[pod.name].get("status") or {}
        ended = conditions(view.objects[pod.name]).get("Ready") or {}
        time = pod.ended or timestamp(ended.get("lastTransitionTime"))
        evidence = Evidence(f"pod {pod.name}", f"Evicted: {status.get('message', '')}", "status.reason", time)
        message = one_line(status.get("message") or pod.message)
        return Found(
            f"{subject(pods)}: its node evicted it: {message}",
            "ask for the resource that the message names (memory, ephemeral-storage), or write less to the pod's disk",
            [evidence],
            names(pods),
        )
    if not hit:
        return None
    name, condition = hit[0]
    return Found(
        f"{name} was evicted: {condition.get('message', '')}",
        f"{view.kubectl_of_cluster('get nodes')} shows whether nodes are being drained; the job goes on when the pod "
        "is back",
        [_disruption(name, condition)],
        [name],
    )


def node_lost(view: JobView) -> Found | None:
    hit = _disrupted(view, ("DeletionByTaintManager", "DeletionByPodGC"))
    lost: list[tuple[PodState, Evidence]] = []
    for pod in view.pods:
        ready = conditions(view.seen.nodes.get(pod.node)).get("Ready")
        if ready and ready.get("status") != "True":
            text = f"{ready.get('status')}: {ready.get('reason')}: {ready.get('message')}"
            lost.append((pod, condition_evidence(f"node {pod.node}", ready, text)))
        elif pod.node and f"nodes/{pod.node}" in view.seen.missing:
            deleted = timestamp(view.objects[pod.name]["metadata"].get("deletionTimestamp"))
            lost.append((pod, Evidence(f"node {pod.node}", "the node does not exist any more", time=deleted)))
        elif pod.phase == PodPhase.UNKNOWN or pod.reason == "NodeLost":
            marked = conditions(view.objects[pod.name]).get("Ready") or {"type": "Ready"}
            lost.append((pod, condition_evidence(f"pod {pod.name}", marked, f"{pod.reason}: {pod.message}")))
        elif ready_false := _not_ready(view, pod):
            lost.append((pod, ready_false))
    if lost:
        pods = [pod for pod, _ in lost]
        return Found(
            f"{subject(pods)}: node {pods[0].node} does not answer",
            "if the node does not come back, "
            f"{view.kubectl_of_cluster(f'delete node {pods[0].node}')} has its pods start elsewhere; "
            f"{view.kubectl_of_cluster(f'describe node {pods[0].node}')} shows its state",
            [lost[0][1]],
            names(pods),
        )
    if hit and not _running_again(view):
        name, condition = hit[0]
        return Found(
            f"{name} was deleted because its node is lost: {condition.get('message', '')}",
            f"{view.flk('wait')} waits until the pod runs on another node",
            [_disruption(name, condition)],
            [name],
            may_last=True,  # the condition may be of a pod that was replaced long ago
        )
    return None


def _not_ready(view: JobView, pod: PodState) -> Evidence | None:
    """Return the event NodeNotReady of a pod, which the node controller writes if the node is silent."""
    ready = conditions(view.objects.get(pod.name)).get("Ready") or {}
    if pod.phase not in (PodPhase.RUNNING, PodPhase.TERMINATING) or ready.get("status") == "True":
        return None  # the event of a node that answers again stays for an hour
    said = [event for event in view.events_of(pod.name) if event.get("reason") == "NodeNotReady"]
    return event_evidence(said[-1]) if said else None


# Types of conditions that are True when something is broken, by who writes them.
_BROKEN: Final = "|".join(
    (
        # node-problem-detector, also as GKE runs it
        r"KernelDeadlock|Read[Oo]nly(Root)?File[Ss]ystem|XfsShutdown|CperHardwareErrorFatal|CorruptDockerOverlay2",
        r"Frequent\w+Restart|FrequentUnregisterNetDevice|(Kubelet|ContainerRuntime)Unhealthy|\w*X(id|ID)\w*Errors?",
        # AKS
        r"(Kubelet|ContainerRuntime|FilesystemCorruption)Problem|GPUMissing|NVLinkStatusInactive|IBLinkFlapping",
        r"UnhealthyNvidia\w+",
        # NVSentinel and DCGM
        r"Gpu\w+(Watch|Error)|SysLogs\w+|NVSwitch(Down|FatalError)|DCGMError",
        # Nebius
        r"Nebius\w+Error",
    )
)
# Types of conditions that are False when something is broken: of EKS.
_READY: Final = r"(AcceleratedHardware|ContainerRuntime|Kernel|Networking|Storage)Ready"


def _faults(node: Object) -> Iterator[tuple[str, Evidence]]:
    """Yield the faults that a node reports: a few words, and where they were read."""
    source = f"node {node['metadata']['name']}"
    for kind, condition in conditions(node).items():
        pattern = {"True": _BROKEN, "False": _READY}.get(str(condition.get("status")))
        if pattern is not None and re.fullmatch(pattern, kind):
            why = ": ".join(filter(None, (condition.get("reason"), one_line(condition.get("message")))))
            text = f"reports {kind}" + (f" ({why})" if why else "")
            yield text, condition_evidence(source, condition, f"{condition.get('status')}: {why}")
    for taint in (node.get("spec") or {}).get("taints") or []:
        if re.match(FAULT_TAINT, str(taint.get("key"))):
            text = taint_text(taint)
            yield f"has the taint {text}", Evidence(source, text, "spec.taints")


def _faulty_node(view: JobView) -> Found | None:
    for name, pod in suspects(view).items():
        node = view.seen.nodes.get(name)
        for text, evidence in _faults(node) if node else ():
            failure = job_failure(view)
            ended = f"; {failure.summary}" if failure else ""
            return Found(f"{pod}: node {name} {text}{ended}", _remedy(view, name), [evidence], [pod])
    return None


def _remedy(view: JobView, node: str) -> str:
    cordon = view.kubectl_of_cluster(f"cordon {node or 'NODE'}")
    keeps = f"{cordon} keeps jobs off the node; have it checked"
    return f"{keeps}, then {view.again()}" if view.failed else keeps


FAULTS: Final = (
    Cause(
        "NodeFaulty",
        _faulty_node,
        cured_by="a node that recovers, or another attempt on other nodes",
    ),
)
CAUSES: Final = (
    Cause(
        "NodeLost",
        node_lost,
        grace=60,
        cured_by="a node that answers again",
        patience=1800,
        from_outside=True,
        awaits="a node that does not answer",
    ),
    Cause(
        "Preempted",
        _preempted,
        cured_by="the controller that creates the pods",
        from_outside=True,
        awaits="pods of higher priority",
    ),
    Cause(
        "Evicted",
        _evicted,
        cured_by="the controller that creates the pods",
        from_outside=True,
        awaits="the controller that replaces the pod",
    ),
)
