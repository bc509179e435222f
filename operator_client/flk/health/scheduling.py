"""Causes of pods without a node: the scheduler finds none that can take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final

from flk.health.cause import Cause, Found, names, subject
from flk.health.scheduler_message import NodeReason, parse
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.view import JobView, pod_spec
from flk.units import parse_quantity, timestamp

_FLAGS: Final = {"cpu": "--cpu", "memory": "--memory", "ephemeral-storage": "a smaller ephemeral-storage request"}
SCHEDULER_DELAY: Final = 30.0  # seconds in which a scheduler should have looked at a pod


def unschedulable(view: JobView) -> tuple[list[PodState], NodeReason, Evidence] | None:
    """Return the pods that no node can take, the reason of the nodes that came closest, and the evidence."""
    pods = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and pod.reason == "Unschedulable"]
    if not pods:
        return None
    reasons = parse(pods[0].message)
    status = view.objects[pods[0].name].get("status") or {}
    condition: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled"), {})
    evidence = Evidence(
        f"pod {pods[0].name}",
        pods[0].message,
        "status.conditions[PodScheduled]",
        timestamp(condition.get("lastTransitionTime")),
    )
    reason = reasons[0] if reasons else NodeReason("other", 0, pods[0].message)
    tainted = _taint_of_chosen_nodes(view, pods[0])
    selected = bool(pod_spec(view.objects[pods[0].name]).get("nodeSelector"))
    if tainted is not None and (reason.kind == "taint" or (reason.kind == "selector" and selected)):
        kept = next((one for one in reasons if one.kind == "taint"), None)
        reason = replace(kept, detail=kept.detail or tainted) if kept else reason
    return pods, reason, evidence


def _taint_of_chosen_nodes(view: JobView, pod: PodState) -> str | None:
    """Return a taint of the nodes that match the pod's node selector; None if no node matches, or if none was read."""
    wanted = (pod_spec(view.objects[pod.name]).get("nodeSelector") or {}).items()
    taints: list[str] = []
    matching = False
    for node in view.around.nodes.values():
        if wanted <= (node["metadata"].get("labels") or {}).items():
            matching = True
            for taint in (node.get("spec") or {}).get("taints") or []:
                if taint.get("effect") != "PreferNoSchedule":
                    value = f"={taint['value']}" if taint.get("value") else ""
                    taints.append(f"{taint.get('key')}{value}:{taint.get('effect')}")
    # A control plane has its taint in each cluster. It is the reason only if the job wants to run there.
    others = [taint for taint in taints if not taint.startswith("node-role.kubernetes.io/")]
    return next(iter(others or taints), None) if matching else None


def _about(kind: str, detail: Callable[[str], bool] = lambda text: True) -> Callable[[JobView], Any]:
    def find(view: JobView) -> tuple[list[PodState], NodeReason, Evidence] | None:
        found = unschedulable(view)
        return found if found and found[1].kind == kind and detail(found[1].detail) else None

    return find


def _requests(view: JobView, pod: PodState, resource: str) -> Decimal:
    """Return how much of a resource the containers of a pod request together."""
    total = Decimal(0)
    for container in pod_spec(view.objects[pod.name]).get("containers") or []:
        resources = container.get("resources") or {}
        value = (resources.get("requests") or {}).get(resource) or (resources.get("limits") or {}).get(resource)
        total += _quantity(value)
    return total


def _quantity(value: Any) -> Decimal:
    try:
        return parse_quantity(str(value or "0"))
    except ValueError:
        return Decimal(0)


def _taints(node: Object) -> list[str]:
    return [str(taint.get("key")) for taint in (node.get("spec") or {}).get("taints") or []]


def _largest(view: JobView, resource: str) -> tuple[str, str]:
    """Return the node that has most of a resource, and how much; empty if no node was read."""
    sizes = {
        name: str(((node.get("status") or {}).get("allocatable") or {}).get(resource) or "0")
        for name, node in view.around.nodes.items()
        if not any(str(key).startswith("node-role.kubernetes.io/") for key in _taints(node))
    }
    name = max(sizes, key=lambda node: _quantity(sizes[node]), default="")
    return name, sizes.get(name, "")


def _insufficient(flag: str, matches: Callable[[str], bool]) -> Callable[[JobView], Found | None]:
    def find(view: JobView) -> Found | None:
        found = _about("resource", matches)(view)
        if found is None:
            return None
        pods, reason, evidence = found
        resource, spec = reason.detail, view.objects[pods[0].name]
        request = next(
            (
                str(value)
                for container in pod_spec(spec).get("containers") or []
                for kind in ("requests", "limits")
                if (value := ((container.get("resources") or {}).get(kind) or {}).get(resource)) is not None
            ),
            "",
        )
        node, size = _largest(view, resource)
        too_large = bool(node) and _requests(view, pods[0], resource) > _quantity(size)
        asks = f"{subject(pods)}: no node has {request or 'enough'} {resource} "
        every = [evidence]
        if node:
            every.append(Evidence(f"node {node}", size, f"status.allocatable[{resource}] (the largest of all nodes)"))
        if too_large:
            return Found(
                f"{asks}at all; the largest node, {node}, has {size}",
                f"ask for less with {flag}, or add a larger node",
                every,
                names(pods),
                resolves_itself=False,
            )
        return Found(
            f"{asks}free",
            f"{view.flk('wait')} waits for other jobs to end; {flag} asks for less; kubectl describe nodes shows "
            "who "
            "uses the nodes",
            every,
            names(pods),
        )

    return find


def _selector(view: JobView) -> Found | None:
    found = _about("selector")(view)
    if found is None:
        return None
    pods, _, evidence = found
    spec = pod_spec(view.objects[pods[0].name])
    wanted = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
    if not wanted:
        return None
    return Found(
        f"{subject(pods)}: no node that could take them has the labels {wanted}"
        if len(pods) > 1
        else f"{subject(pods)}: no node that could take it has the labels {wanted}",
        f"kubectl get nodes -L {','.join(spec['nodeSelector'])} shows the labels that nodes have; correct "
        "--node-selector",
        [evidence, Evidence(f"pod {pods[0].name}", wanted, "spec.nodeSelector")],
        names(pods),
    )


def _node_affinity(view: JobView) -> Found | None:
    found = _about("selector")(view)
    if found is None:
        return None
    pods, _, evidence = found
    return Found(
        f"{subject(pods)}: no node matches the required node affinity",
        "kubectl get nodes --show-labels shows the labels that nodes have; correct the affinity in the job's patch",
        [evidence, Evidence(f"pod {pods[0].name}", "requiredDuringSchedulingIgnoredDuringExecution", "spec.affinity")],
        names(pods),
    )


def _taint(view: JobView) -> Found | None:
    found = _about("taint", lambda taint: not taint.startswith("node.kubernetes.io/"))(view)
    if found is None:
        return None
    pods, reason, evidence = found
    taint = f"the taint {reason.detail}" if reason.detail else "a taint"
    return Found(
        f"{subject(pods)}: the nodes that could run it have {taint}, which the pods do not tolerate",
        f"submit with --toleration {reason.detail or 'KEY'} if the job may run there; kubectl describe nodes shows the "
        "taints",
        [evidence],
        names(pods),
    )


def _nodes_not_ready(view: JobView) -> Found | None:
    tainted = _about("taint", lambda taint: taint.startswith("node.kubernetes.io/"))
    found = tainted(view) or _about("unschedulable")(view)
    if found is None:
        return None
    pods, reason, evidence = found
    return Found(
        f"{subject(pods)}: the nodes that could run it are not ready or take no pods ({reason.detail or reason.text})",
        "kubectl get nodes shows their state; the administrator of the cluster can bring them back",
        [evidence],
        names(pods),
    )


def _pod_affinity(view: JobView) -> Found | None:
    found = _about("affinity")(view)
    if found is None:
        return None
    pods, reason, evidence = found
    return Found(
        f"{subject(pods)}: no node satisfies the affinity between pods ({reason.text})",
        f"{view.kubectl('get pods --show-labels -o wide')} shows which pods run where; correct spec.affinity in the "
        "job's patch",
        [evidence, Evidence(f"pod {pods[0].name}", "podAffinity or podAntiAffinity", "spec.affinity")],
        names(pods),
    )


def _topology_spread(view: JobView) -> Found | None:
    found = _about("spread")(view)
    if found is None:
        return None
    pods, reason, evidence = found
    return Found(
        f"{subject(pods)}: no node satisfies the topology spread constraints ({reason.text})",
        "correct spec.topologySpreadConstraints in the job's patch",
        [evidence],
        names(pods),
    )


def _no_scheduler(view: JobView) -> Found | None:
    pods = [
        pod
        for pod in view.pods
        if pod.phase == PodPhase.PENDING
        and not pod.reason
        and view.now - timestamp(view.objects[pod.name]["metadata"].get("creationTimestamp")) > SCHEDULER_DELAY
        and pod_spec(view.objects[pod.name]).get("schedulerName") not in (None, "default-scheduler")
    ]
    if not pods:
        return None
    name = str(pod_spec(view.objects[pods[0].name]).get("schedulerName"))
    created = timestamp(view.objects[pods[0].name]["metadata"].get("creationTimestamp"))
    return Found(
        f"{subject(pods)}: the scheduler {name} has not looked at it; it may not exist in this cluster",
        "remove schedulerName from the job's patch, or name a scheduler that runs",
        [Evidence(f"pod {pods[0].name}", name, "spec.schedulerName", created)],
        names(pods),
    )


def _gated(view: JobView) -> Found | None:
    pods = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and pod.reason == "SchedulingGated"]
    if not pods:
        return None
    gates = pod_spec(view.objects[pods[0].name]).get("schedulingGates") or []
    words = ", ".join(str(gate.get("name")) for gate in gates) or "a gate"
    created = timestamp(view.objects[pods[0].name]["metadata"].get("creationTimestamp"))
    return Found(
        f"{subject(pods)}: scheduling is held back by {words}",
        "wait until the controller that has set the gate removes it",
        [Evidence(f"pod {pods[0].name}", words, "spec.schedulingGates", created)],
        names(pods),
    )


def _other(view: JobView) -> Found | None:
    found = unschedulable(view)
    # What a volume prevents has its own causes, which say more.
    if found is None:
        return None
    pods, reason, evidence = found
    return Found(
        f"{subject(pods)}: no node can take it ({reason.text})",
        f"{view.kubectl(f'describe pod {pods[0].name}')} shows the scheduler's events",
        [evidence],
        names(pods),
    )


_READ: Final = (
    "flk reads the condition PodScheduled of the pods. The scheduler names the first test that each node fails; flk "
    "reports "
    "the test that the closest nodes fail, and leaves control planes out."
)
_CAPACITY: Final = (
    "Wait for other jobs to end, ask for less, or add nodes. If no node is that large, flk calls the job stuck."
)


def _is_gpu(resource: str) -> bool:
    return "gpu" in resource or "nvidia.com/" in resource or "amd.com/" in resource


SCHEDULING: Final = (
    Cause(
        "NotEnoughCpu",
        "No node has enough CPU",
        f"The pods request more CPU than any node has free. {_READ}",
        _CAPACITY,
        _insufficient("--cpu", lambda resource: resource == "cpu"),
        grace=60,
        resolves_itself=True,
    ),
    Cause(
        "NotEnoughMemory",
        "No node has enough memory",
        f"The pods request more memory than any node has free. {_READ}",
        _CAPACITY,
        _insufficient("--memory", lambda resource: resource == "memory"),
        grace=60,
        resolves_itself=True,
    ),
    Cause(
        "NotEnoughGpus",
        "No node has enough GPUs",
        "The pods request more GPUs than any node has free, or nodes do not offer GPUs at all: their device plugin "
        "may "
        f"not run. {_READ}",
        _CAPACITY,
        _insufficient("--gpu", _is_gpu),
        grace=60,
        resolves_itself=True,
    ),
    Cause(
        "NotEnoughOfResource",
        "No node has enough of a resource",
        "The pods request more of an extended resource, of storage or of the number of pods than any node has free. "
        f"{_READ}",
        _CAPACITY,
        _insufficient("--resource", lambda resource: True),
        grace=60,
        resolves_itself=True,
    ),
    Cause(
        "NodeSelectorMismatch",
        "No node has the labels of the node selector",
        f"The job demands labels that no suitable node has. {_READ}",
        "Correct --node-selector, or label nodes.",
        _selector,
        grace=60,
    ),
    Cause(
        "NodeAffinityMismatch",
        "No node matches the required node affinity",
        f"The pod template demands a node affinity that no suitable node has. {_READ}",
        "Correct the affinity in the job's patch, or label nodes.",
        _node_affinity,
        grace=60,
    ),
    Cause(
        "NodesNotReady",
        "The nodes that could run the pods are not ready or take no pods",
        f"Nodes are cordoned, not ready or unreachable. {_READ}",
        "The administrator of the cluster can bring the nodes back.",
        _nodes_not_ready,
        resolves_itself=True,
    ),
    Cause(
        "TaintNotTolerated",
        "The nodes have a taint that the pods do not tolerate",
        f"Nodes that are set aside for other work have a taint. {_READ}",
        "Add --toleration KEY=VALUE if the job may run there.",
        _taint,
        grace=60,
    ),
    Cause(
        "PodAffinityUnsatisfied",
        "No node satisfies the affinity between pods",
        f"The pod template demands other pods on the same node, or none of them, and no node complies. {_READ}",
        "Correct spec.affinity in the job's patch.",
        _pod_affinity,
        grace=60,
    ),
    Cause(
        "TopologySpreadUnsatisfied",
        "No node satisfies the topology spread constraints",
        f"The pod template demands an even spread that the nodes do not allow. {_READ}",
        "Correct spec.topologySpreadConstraints in the job's patch.",
        _topology_spread,
        grace=60,
    ),
    Cause(
        "SchedulerMissing",
        "The scheduler that the pods name does not look at them",
        "spec.schedulerName names a scheduler that does not run. No event and no condition says so.",
        "Remove schedulerName, or name a scheduler that runs.",
        _no_scheduler,
        grace=60,
    ),
    Cause(
        "SchedulingGated",
        "A scheduling gate holds the pods back",
        "Another controller has set spec.schedulingGates and removes the gate when the pods may be scheduled.",
        "Wait for that controller.",
        _gated,
        resolves_itself=True,
    ),
)
UNSCHEDULABLE: Final = Cause(
    "Unschedulable",
    "No node can take the pods",
    f"The scheduler gives a reason that flk does not know more about. {_READ}",
    "Read the scheduler's message; `kubectl describe pod` shows its events.",
    _other,
    grace=300,
    resolves_itself=True,
)
