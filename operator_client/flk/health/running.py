"""Causes of jobs whose pods have started: nodes that are lost, pods that are evicted, ranks that never join."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, names, subject
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.view import JobView
from flk.units import short_duration, timestamp

JOIN_DELAY: Final = 20.0  # seconds after the start of the last container in which all launchers should have joined
_JOINED: Final = re.compile(r"(\d+) of (\d+) pods have joined; waiting for pods? ([\d, …]+)")
_NO_LEADER: Final = re.compile(r"waiting for the launcher of pod 0 at (\S+?):(\d+) since (\d+) s: (.+)")
_UNRESOLVED: Final = ("Name or service not known", "Temporary failure in name resolution", "No address associated")


def _conditions(item: Object) -> dict[str, Object]:
    return {str(c.get("type")): c for c in (item.get("status") or {}).get("conditions") or []}


def _disrupted(view: JobView, reasons: tuple[str, ...]) -> list[tuple[str, Object]]:
    """Return name and condition of pods, also replaced ones, that were ended from outside for one of these reasons."""
    found = []
    for name, pod in [*view.objects.items(), *view.replaced_pods.items()]:
        condition = _conditions(pod).get("DisruptionTarget") or {}
        if condition.get("status") == "True" and condition.get("reason") in reasons:
            found.append((name, condition))
    return found


def _disruption(name: str, condition: Object) -> Evidence:
    text = f"{condition.get('reason')}: {condition.get('message', '')}"
    time = timestamp(condition.get("lastTransitionTime"))
    return Evidence(f"pod {name}", text, "status.conditions[DisruptionTarget]", time)


def _running_again(view: JobView) -> bool:
    return all(pod.phase in (PodPhase.RUNNING, PodPhase.SUCCEEDED) for pod in view.pods)


def _preempted(view: JobView) -> Found | None:
    if _running_again(view):
        return None
    hit = _disrupted(view, ("PreemptionByScheduler",))
    events = [
        event for pod_events in view.pod_events.values() for event in pod_events if event.get("reason") == "Preempted"
    ]
    if not hit and not events:
        return None
    if hit:
        name, evidence = hit[0][0], [_disruption(*hit[0])]
    else:
        name, evidence = str((events[-1].get("involvedObject") or {}).get("name")), [event_evidence(events[-1])]
    return Found(
        f"{name} was preempted: the scheduler gave its place to a pod of higher priority",
        f"{view.flk('wait')} waits until there is room again; a higher priority class or --checkpoint loses less",
        evidence,
        [pod for pod, _ in hit] or [name],
    )


def _evicted(view: JobView) -> Found | None:
    if _running_again(view):
        return None
    hit = _disrupted(view, ("TerminationByKubelet", "EvictionByEvictionAPI"))
    pods = [pod for pod in view.pods if pod.reason == "Evicted"]
    if pods:
        pod = pods[0]
        status = view.objects[pod.name].get("status") or {}
        ended = _conditions(view.objects[pod.name]).get("Ready") or {}
        time = pod.ended or timestamp(ended.get("lastTransitionTime"))
        evidence = Evidence(f"pod {pod.name}", f"Evicted: {status.get('message', '')}", "status.reason", time)
        message = " ".join(str(status.get("message") or pod.message).split())
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
        "kubectl get nodes shows whether nodes are being drained; the job goes on when the pod is back",
        [_disruption(name, condition)],
        [name],
    )


def _node_lost(view: JobView) -> Found | None:
    hit = _disrupted(view, ("DeletionByTaintManager", "DeletionByPodGC", "DeviceTaintManager"))
    lost: list[tuple[PodState, Evidence]] = []
    for pod in view.pods:
        node = view.around.nodes.get(pod.node)
        ready = _conditions(node).get("Ready") if node else None
        if ready and ready.get("status") != "True":
            text = f"{ready.get('status')}: {ready.get('reason')}: {ready.get('message')}"
            time = timestamp(ready.get("lastTransitionTime"))
            lost.append((pod, Evidence(f"node {pod.node}", text, "status.conditions[Ready]", time)))
        elif pod.node and f"nodes/{pod.node}" in view.around.missing:
            lost.append((pod, Evidence(f"node {pod.node}", "the node does not exist any more")))
        elif pod.phase == PodPhase.UNKNOWN or pod.reason == "NodeLost":
            lost.append((pod, Evidence(f"pod {pod.name}", f"{pod.reason}: {pod.message}", "status.phase")))
        elif ready_false := _not_ready(view, pod):
            lost.append((pod, ready_false))
    if lost:
        pods = [pod for pod, _ in lost]
        return Found(
            f"{subject(pods)}: node {pods[0].node} does not answer",
            f"if the node does not come back, kubectl delete node {pods[0].node} has its pods start elsewhere; "
            f"kubectl describe node {pods[0].node} shows its state",
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
        )
    return None


def _not_ready(view: JobView, pod: PodState) -> Evidence | None:
    """Return that the node controller has marked a running pod as not ready, which it does where the node is silent."""
    if pod.phase not in (PodPhase.RUNNING, PodPhase.TERMINATING):
        return None
    for event in reversed(view.pod_events.get(pod.name, [])):
        if event.get("reason") == "NodeNotReady":
            return event_evidence(event)
    return None


def _last_lines(view: JobView, pattern: re.Pattern[str]) -> tuple[str, str, re.Match[str]] | None:
    """Return pod, line and match of the last line of a launcher that matches, if no later line says otherwise."""
    for name, lines in view.around.logs.items():
        for line in reversed(lines):
            match = pattern.search(line)
            if match:
                return name, line, match
            if line.startswith("[rank "):
                break  # ranks have started since
    return None


def _waiting_since(view: JobView) -> float:
    return max((pod.started or 0.0 for pod in view.pods), default=0.0)


def _never_joined(view: JobView) -> Found | None:
    if _node_lost(view):
        return None  # which is why its launcher does not join
    if not view.from_flk or any(pod.phase != PodPhase.RUNNING for pod in view.pods):
        return None
    since = _waiting_since(view)
    age = view.now - since
    duration = f"its container has run for {short_duration(age)}"
    leader = _last_lines(view, _JOINED)
    attempts = view.record.attempts if view.record else []
    if leader:
        name, line, match = leader
        index = int(re.split(r"\D", match[3])[0])
        absent = next((pod for pod in view.pods if pod.index == index), None)
        if absent is None or age < JOIN_DELAY:
            return None
        return Found(
            f"{match[1]} of {match[2]} pods have joined; the launcher of {absent.name} (rank {absent.ranks[0]}) has "
            "not, and the others wait for it",
            f"{view.kubectl(f'logs {absent.name}')} shows how far it is; kubectl delete pod {absent.name} -n "
            f"{view.namespace} starts it again",
            [
                Evidence(f"log of {name}", line.strip()),
                Evidence(
                    f"pod {absent.name}",
                    duration,
                    "status.containerStatuses",
                    since,
                ),
            ],
            [absent.name],
            since=since,
        )
    follower = _last_lines(view, _NO_LEADER)
    if not follower or attempts or age < JOIN_DELAY:
        return None
    name, line, match = follower
    if any(words in match[4] for words in _UNRESOLVED):
        return None  # the next row says more
    first = view.pods[0]
    return Found(
        f"the launcher of {first.name} (rank 0) has not started, although its container "
        "runs; the "
        "other pods wait for it",
        f"{view.kubectl(f'logs {first.name}')} shows how far it is; {view.kubectl(f'delete pod {first.name}')} "
        "starts "
        "it again",
        [
            Evidence(f"log of {name}", line.strip()),
            Evidence(
                f"pod {first.name}",
                duration,
                "status.containerStatuses",
                since,
            ),
        ],
        [first.name],
        since=since,
    )


def _unresolved(view: JobView) -> Found | None:
    found = _last_lines(view, _NO_LEADER)
    if not found or not any(words in found[2][4] for words in _UNRESOLVED):
        return None
    if view.pods[0].phase != PodPhase.RUNNING:
        return None  # its service has no endpoint before it runs, at first or in the place of a lost pod
    name, line, match = found
    return Found(
        f"{name} cannot resolve the name {match[1]} of the first pod ({match[4].strip()})",
        f"{view.kubectl(f'get service {match[1]}')} shows the service that gives the name; kubectl get pods -n "
        "kube-system "
        "-l k8s-app=kube-dns shows the cluster's DNS; also check dnsPolicy and dnsConfig in the job's patch",
        [Evidence(f"log of {name}", line.strip(), time=_waiting_since(view))],
        [name],
    )


RUNNING: Final = (
    Cause(
        "NodeLost",
        "A node does not answer",
        "The kubelet of a node has stopped reporting, or the node was removed. flk reads the conditions of the node "
        "and of its pods. After five minutes Kubernetes marks the pods for deletion, but they are replaced only when "
        "the node answers again or is deleted.",
        "Wait, or delete the node if it does not come back: its pods start elsewhere at once.",
        _node_lost,
        grace=60,
        resolves_itself=True,
    ),
    Cause(
        "Preempted",
        "A pod of higher priority has taken the place of a pod",
        "The scheduler has ended a pod to make room for one of higher priority. flk reads the condition "
        "DisruptionTarget of "
        "the pod and the event Preempted.",
        "Wait until there is room again. The job continues from its newest checkpoint.",
        _preempted,
        resolves_itself=True,
    ),
    Cause(
        "Evicted",
        "A pod was evicted",
        "A node has ended the pod because it ran out of memory or disk, or somebody drains the node. flk reads the "
        "pod's "
        "reason and its condition DisruptionTarget.",
        "Request what the pod uses, or write less to its disk. A drained node needs nothing: the pod starts elsewhere.",
        _evicted,
        resolves_itself=True,
    ),
    Cause(
        "NameNotResolved",
        "The name of the first pod does not resolve",
        "The launchers meet at the pod with rank 0, which they find through a service of its name. A launcher "
        "reports that "
        "the name does not resolve. flk reads the log of the pods.",
        "Check the service, the cluster's DNS, and dnsPolicy in the job's patch.",
        _unresolved,
        grace=60,
    ),
    Cause(
        "RankNeverJoined",
        "A rank never joins",
        "All containers run, and the launcher of one pod has not joined the others. flk reads which pod is missing "
        "in the "
        "logs of the launchers.",
        "Read the log of the pod that is missing. Deleting that pod starts it again.",
        _never_joined,
        grace=60,
    ),
)
