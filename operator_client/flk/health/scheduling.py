"""Scheduling: whether the pods of a job fit on the nodes, pods without a node, and controllers that add nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flk.health.cause import (
    Cause,
    Found,
    Locate,
    Match,
    condition_evidence,
    event_evidence,
    first_said,
    found_by,
    names,
    subject,
    tell,
)
from flk.health.cluster import (
    Amounts,
    Cluster,
    Level,
    NodeReason,
    Pods,
    Result,
    Unreadable,
    allocatable,
    amount_text,
    fitting,
    is_accelerator,
    is_allowed,
    is_cordoned,
    is_node_state,
    is_selected,
    node_affinity_text,
    node_reasons,
    quantity,
    requests,
    untolerated,
)
from flk.kube import Object
from flk.observe.model import Evidence, Finding, PodPhase, PodState
from flk.observe.observation import event_time
from flk.observe.pods import conditions, one_line
from flk.observe.view import JobView, pod_spec
from flk.spec.names import DEFAULT_IMAGE, IMAGE_ARCHITECTURE
from flk.spec.units import created_at
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.values import dataclass, replace

_ADDS: Final = ("TriggeredScaleUp", "Nominated")  # of cluster-autoscaler and Karpenter
_REFUSES: Final = ("NotTriggerScaleUp", "FailedScaleUp", "FailedScheduling")
# The scheduler sends events with the reason FailedScheduling too, without these words.
_KARPENTER_REFUSES: Final = r"^Failed to schedule pod\b"
_BEGINNING: Final = r"^(pod (?:triggered|didn't trigger) scale-up|Failed to schedule pod)[:,]? *"
# A node group suits the pods, and cannot grow now.
_LATER: Final = (
    r"(?i)in backoff after failed scale-up|max node group size reached|max cluster .*limit reached"
    r"|exceed(?:s|ed)? limits?\b|out of resources|insufficient ?capacity|quota"
)
SILENCE: Final = 300.0  # seconds in which the autoscaler of a cloud should have said something about a pod
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
        source = (self.event.get("source") or {}).get("component")
        return str(source or self.event.get("reportingComponent") or "an autoscaler")

    @property
    def text(self) -> str:
        """What it says, without the words that all of its events begin with."""
        return re.sub(_BEGINNING, "", one_line(self.event.get("message"))).rstrip(".")


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
    """Return the finding that no node can take pods, with more time where nodes may come.

    A ProvisioningRequest may take hours, and the autoscaler of a cloud some minutes until it speaks.
    """
    requested = [item for pod in view.unschedulable for item in _provisioning(view, pod)]
    if requested:
        return replace(finding, resolves_itself=True, stuck_after=None, evidence=[*finding.evidence, requested[0]])
    nodes = view.seen.nodes
    cloud = of_cluster([*nodes.values()], karpenter=False, status=False)
    if not cloud or finding.resolves_itself or answer(view) is not None:
        return finding
    made = next(node for node in nodes.values() if (node.get("spec") or {}).get("providerID"))
    text = f"{made['spec']['providerID']}: an autoscaler of {cloud} may add a node, and has said nothing yet"
    evidence = Evidence(f"node {made['metadata']['name']}", text, "spec.providerID")
    return replace(finding, grace=max(finding.grace, SILENCE), evidence=[*finding.evidence, evidence])


def _provisioning(view: JobView, pod: PodState) -> list[Evidence]:
    """Return the ProvisioningRequest that makes the nodes of a pod, as in GKE's flex-start; empty if it names none."""
    notes = view.objects[pod.name]["metadata"].get("annotations") or {}
    return [
        Evidence(f"pod {pod.name}", str(name), f"metadata.annotations[{key}]")
        for key, name in notes.items()
        if key.endswith("/consume-provisioning-request")
    ]


def _adds(event: Object) -> bool:
    return event.get("reason") in _ADDS


def _refuses(event: Object) -> bool:
    of_scheduler = event.get("reason") == "FailedScheduling" and not re.match(
        _KARPENTER_REFUSES, str(event.get("message"))
    )
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
    if found is None or found.adds or not re.search(_LATER, found.text):
        return None
    return Found(
        f"{subject(found.pods)}: no node can take it, and {found.who} can add none now ({found.text})",
        f"{view.flk('wait')} waits for other jobs to end or for the autoscaler to try again; the administrator of the "
        "cluster can raise the limit that is named",
        [event_evidence(found.event)],
        names(found.pods),
        since=found.since,
    )


SHORT: Final = "NotEnoughResources"
_LASTS: Final = "does not exist|affinity rules|topology spread"  # until somebody changes the job
SCHEDULER_DELAY: Final = 30.0  # seconds in which a scheduler should have looked at a pod
_DEFAULT_DELAY: Final = 300.0  # the same for Kubernetes' own, which is away for minutes while a control plane restarts
_GATE_GRACE: Final = 1800.0  # seconds in which somebody should have removed a gate
_DEVICES: Final = (
    r"cannot allocate all claims|(ResourceClaim not created yet|resourceclaim\S* \S+ not found"
    r"|device class \S+ does not exist)"
)
_DEFAULT: Final = "default-scheduler"
_CONTROL_PLANE: Final = "node-role.kubernetes.io/"  # how the taints of control planes begin


def gpus(cluster: Cluster) -> Iterator[Result]:
    """Say how many GPUs the nodes offer."""
    if isinstance(cluster.nodes, Unreadable):
        yield Result("gpus", Level.UNKNOWN, f"the nodes cannot be read: {cluster.nodes.reason}")
        return
    offered: Amounts = {}
    for node in cluster.nodes:
        for name, amount in allocatable(node).items():
            if is_accelerator(name):
                offered[name] = offered.get(name, 0.0) + amount
    texts = [f"{total:.0f} {name}" for name, total in sorted(offered.items())]
    yield Result("gpus", Level.OK, "; ".join(texts) or "no node offers GPUs")


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Compare the job with what fits on the nodes that its selector and tolerations allow, if they are empty."""
    if isinstance(cluster.nodes, Unreadable):
        yield Result("capacity", Level.UNKNOWN, f"the nodes cannot be read: {cluster.nodes.reason}")
        return
    for name in sorted(pods.requests):
        if "/" in name and not any(allocatable(node).get(name) for node in cluster.nodes):
            found = f"the job requests {name}, and no node offers any"
            remedy = f"install the device plugin for {name}, or request none"
            yield _no_node(cluster, found, remedy, SHORT)
            return
    allowed = [node for node in cluster.nodes if is_allowed(node, pods.spec)]
    if not allowed:
        found, code = _nobody_allowed(cluster.nodes, pods.spec)
        other = _other_image(pods.spec.get("nodeSelector") or {})
        remedy = f"change --gpu, nodes.selector, nodes.tolerations or the patch{other}"
        yield _no_node(cluster, found, remedy, code)
        return
    most = sum(fitting(allocatable(node), pods.requests) for node in allowed)
    each = ", ".join(f"{amount_text(name, amount)} {name}" for name, amount in sorted(pods.requests.items()))
    size = f"pods of {each}" if each else "pods"
    held = f"{plural(len(allowed), 'node')} could hold {most} {size} if they were empty, and the job has {pods.count}"
    if most >= pods.count:
        yield Result("capacity", Level.OK, held)
        return
    found = f"{held}{_others(_kept_away(cluster.nodes, pods), pods.spec)}"
    yield _no_node(cluster, found, "use fewer or smaller pods, add nodes, or tolerate the taints (--toleration)", SHORT)


def _no_node(cluster: Cluster, found: str, remedy: str, code: str) -> Result:
    """Return the result for a job that the nodes of now cannot run: an autoscaler may add one that can."""
    if not cluster.autoscaler:
        return Result("capacity", Level.FAILED, found, remedy, code)
    added = f"{found}: no node now; an autoscaler may add one ({cluster.autoscaler})"
    return Result("capacity", Level.WARNING, added, f"if it adds none: {remedy}", code)


def _nobody_allowed(nodes: Sequence[Object], spec: Object) -> tuple[str, str]:
    """Return why no node may run the pods, and the code of that cause."""
    selected = [node for node in nodes if is_selected(node, spec)]
    if not selected:
        affinity = node_affinity_text(spec)
        if affinity and any(is_selected(node, {**spec, "affinity": None}) for node in nodes):
            return f"no node matches the required node affinity: {affinity}", "NodeSelectorMismatch"
        labels = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
        return f"no node has the labels {labels}" if labels else "the cluster has no nodes", "NodeSelectorMismatch"
    taints = [next(untolerated(node, spec)) for node in selected if not is_cordoned(node)]
    code = "NodesNotReady" if all(map(is_node_state, taints)) else "TaintNotTolerated"
    return f"no node accepts the job's pods: {_refusals(selected, spec)}", code


def _labels(view: JobView, spec: Object) -> Object:
    """Return the labels that a pod's user chose, and the default image's where that alone keeps nodes from the pod."""
    labels = spec.get("nodeSelector") or {}
    if not any(container.get("image") == DEFAULT_IMAGE for container in spec.get("containers") or []):
        return labels
    chosen = {key: value for key, value in labels.items() if IMAGE_ARCHITECTURE.get(key) != value}
    suited = [node for node in view.seen.nodes.values() if is_selected(node, {**spec, "nodeSelector": chosen})]
    return labels if suited and not any(is_selected(node, spec) for node in suited) else chosen


def _other_image(labels: Object) -> str:
    """Return a further remedy for pods that select nodes of the default image's architecture; empty for others."""
    named = IMAGE_ARCHITECTURE.items() <= labels.items()
    return ", or choose an image for the architecture of the nodes (--image)" if named else ""


def _kept_away(nodes: Sequence[Object], pods: Pods) -> list[Object]:
    """Return the nodes that have room for pods of a job and do not accept them, without control planes."""
    return [
        node
        for node in nodes
        if is_selected(node, pods.spec)
        and not is_allowed(node, pods.spec)
        and not any(taint.startswith(_CONTROL_PLANE) for taint in untolerated(node, pods.spec))
        and fitting(allocatable(node), pods.requests)
    ]


def _others(able: Sequence[Object], spec: Object) -> str:
    """Return that nodes have room for pods of a job and do not accept them, as the end of a sentence; or nothing."""
    if not able:
        return ""
    accept = "does not accept" if len(able) == 1 else "do not accept"
    return f"; {plural(len(able), 'other node')} could hold some, but {accept} them: {_refusals(able, spec)}"


def _refusals(nodes: Sequence[Object], spec: Object) -> str:
    """Return why nodes accept no pods of a job. A cordoned node has a taint too, which says less."""
    reasons = {"it is cordoned" if is_cordoned(node) else f"taint {next(untolerated(node, spec))}" for node in nodes}
    return "; ".join(sorted(reasons))


def _flag(resource: str) -> str:
    """Return the option by which a job asks for less of a resource; empty if there is none."""
    if resource in ("cpu", "memory", "ephemeral-storage"):
        return f"--{resource}"
    if resource == "pods":
        return ""
    return "--gpu" if any(word in resource for word in ("gpu", "nvidia.com/", "amd.com/")) else "--resource"


@dataclass(frozen=True)
class Unschedulable:
    """Pods that no node can take."""

    pods: Sequence[PodState]
    reason: NodeReason  # of the nodes that came closest
    evidence: Sequence[Evidence]


def unschedulable(view: JobView) -> Unschedulable | None:
    """Return the pods that no node can take, and why; None if there are none."""
    pods = [pod for pod in view.unschedulable if pod.reason == "Unschedulable"] or view.unschedulable  # or gated ones
    if not pods:
        return None
    reasons, spec = node_reasons(pods[0].message), pod_spec(view.objects[pods[0].name])
    reason = reasons[0] if reasons else NodeReason("other", 0, pods[0].message)
    tainted, labels = _taint_of_chosen_nodes(view, spec), _labels(view, spec)
    # Nodes that are cordoned or not ready may come back.
    absent = [
        one for one in reasons if one.kind == "unschedulable" or (one.kind == "taint" and is_node_state(one.detail))
    ]
    away = absent[0] if absent else None
    if tainted is not None and (reason.kind == "taint" or (reason.kind == "selector" and labels)):
        kept = next((one for one in reasons if one.kind == "taint"), None)
        reason = replace(kept, detail=kept.detail or tainted) if kept else reason
        reason = away if away and is_node_state(tainted) else reason
    elif reason.kind == "volume" or (reason.kind == "selector" and not labels):
        # The scheduler tests these later, or not at all, on nodes that are away or full: the right node may be one.
        reason = away or next((one for one in reasons if one.kind == "resource"), reason)
    return Unschedulable(pods, reason, [scheduling_evidence(view, pods[0]), *refusal(view)])


def scheduler_says(pattern: str) -> Locate:
    """Return a Locate for pending pods about which the scheduler says what matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        waiting = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and pod.message]
        found = [(pod, match) for pod in waiting if (match := re.search(pattern, pod.message))]
        if not found:
            return None
        pod, match = found[0]
        return Match([pod.name for pod, _ in found], [scheduling_evidence(view, pod)], (match[0], *match.groups("")))

    return locate


def scheduling_evidence(view: JobView, pod: PodState) -> Evidence:
    """Return the scheduler's message about a pod as evidence."""
    condition = conditions(view.objects[pod.name]).get("PodScheduled") or {"type": "PodScheduled"}
    evidence = condition_evidence(f"pod {pod.name}", condition, pod.message)
    # The condition tells since when the pod has no node, and the event since when it has none for this reason.
    return replace(evidence, time=first_said(view, pod) or evidence.time)


def _taint_of_chosen_nodes(view: JobView, spec: Object) -> str | None:
    """Return a taint that keeps the pod off the nodes of its node selector; None if no node matches or was read."""
    chosen = [node for node in view.seen.nodes.values() if is_selected(node, spec)]
    taints = [taint for node in chosen for taint in untolerated(node, spec)]
    # A control plane has its taint in each cluster. It is the reason only if the job wants to run there.
    others = [taint for taint in taints if not taint.startswith(_CONTROL_PLANE)]
    # A node that comes back can take the pod, whatever taints the others have.
    return next(iter(sorted(others, key=lambda taint: not is_node_state(taint)) or taints), None)


def _refused_by_nodes(kind: str, matches: Callable[[str], bool] = lambda detail: True) -> Locate:
    """Return a Locate for pods that the closest nodes refuse for this kind of reason; texts: reason and detail."""

    def locate(view: JobView) -> Match | None:
        found = unschedulable(view)
        if found is None or (kind and found.reason.kind != kind) or not matches(found.reason.detail):
            return None
        return Match(names(found.pods), found.evidence, (found.reason.text, found.reason.detail))

    return locate


def _insufficient(view: JobView, match: Match) -> Found:
    """Describe pods that ask for more of a resource than any node has."""
    resource, spec = match[1], pod_spec(view.objects[match.pods[0]])
    less = _flag(resource)
    needed = requests(spec).get(resource, 0.0)
    asks = f"{match}: no node has {amount_text(resource, needed) if needed else 'enough'} {resource}"
    # Nodes that the pod may not run on, such as control planes, do not count. Nodes that are away may come back.
    sizes = {
        name: str(((node.get("status") or {}).get("allocatable") or {}).get(resource) or "0")
        for name, node in view.seen.nodes.items()
        if is_allowed(node, spec, when_back=True)
    }
    if sizes:
        node = max(sizes, key=lambda name: quantity(sizes[name]))
        field = f"status.allocatable[{resource}] (the largest of all nodes)"
        match = replace(match, evidence=[*match.evidence, Evidence(f"node {node}", sizes[node], field)])
        if not quantity(sizes[node]):
            asked = f"{less} or --fabric, whichever asks for it" if less == "--resource" else less
            remedy = f"add nodes that offer {resource}, which a device plugin has them do, or leave out {asked}"
            return match.found(f"{match}: no node offers {resource}", remedy, resolves_itself=False)
        if not fitting(allocatable(view.seen.nodes[node]), {resource: needed}):
            sentence = f"{asks} at all; the largest node, {node}, has {sizes[node]}"
            return match.found(sentence, f"ask for less with {less}, or add a larger node", resolves_itself=False)
    remedy = (
        f"{view.flk('wait')} waits for other jobs to end; {f'{less} asks for less; ' if less else ''}"
        f"{view.kubectl_of_cluster('describe nodes')} shows who uses the nodes"
    )
    return match.found(f"{asks} free", remedy)


def _selector(view: JobView, match: Match) -> Found:
    spec = pod_spec(view.objects[match.pods[0]])
    labels = _labels(view, spec) or ({} if node_affinity_text(spec) else spec.get("nodeSelector"))
    if not labels:
        return match.found(
            f"{match}: no node matches the required node affinity",
            f"{view.kubectl_of_cluster('get nodes --show-labels')} shows the labels that nodes have; correct the type "
            "of GPUs (--gpu) or the affinity in the job's patch, or avoid fewer nodes (--avoid-node)",
            Evidence(f"pod {match.pods[0]}", node_affinity_text(spec), "spec.affinity.nodeAffinity"),
        )
    wanted = ", ".join(f"{key}={value}" for key, value in labels.items())
    them = "them" if len(match.pods) > 1 else "it"
    return match.found(
        f"{match}: no node that could take {them} has the labels {wanted}",
        f"{view.kubectl_of_cluster('get nodes -L ' + ','.join(labels))} shows the labels that nodes have; correct "
        f"--node-selector{_other_image(labels)}",
        Evidence(f"pod {match.pods[0]}", wanted, "spec.nodeSelector"),
    )


def _nodes_not_ready(view: JobView) -> Match | None:
    found = _refused_by_nodes("taint", is_node_state)(view) or _refused_by_nodes("unschedulable")(view)
    if found is None:
        return None
    return replace(found, texts=(found[1] or found[0],))


def _unseen(view: JobView) -> Match | None:
    """Find pods that no scheduler has looked at for some seconds, though they name one."""
    delays = {_DEFAULT: _DEFAULT_DELAY}  # of other schedulers: SCHEDULER_DELAY
    unseen = [pod for pod in view.pods if pod.phase == PodPhase.PENDING and not pod.reason]
    pods = [
        pod for pod in unseen if view.now - _created(view, pod) > delays.get(_scheduler(view, pod), SCHEDULER_DELAY)
    ]
    if not pods:
        return None
    name = _scheduler(view, pods[0])
    evidence = Evidence(f"pod {pods[0].name}", name, "spec.schedulerName", _created(view, pods[0]))
    return Match(names(pods), [evidence], (name,))


def _scheduler(view: JobView, pod: PodState) -> str:
    return str(pod_spec(view.objects[pod.name]).get("schedulerName") or _DEFAULT)


def _created(view: JobView, pod: PodState) -> float:
    return created_at(view.objects[pod.name])


def _no_node_takes(view: JobView, match: Match) -> Found:
    """Describe pods that no node can take for a reason of which flk does not know more."""
    grace = _GATE_GRACE if "scheduling gates" in match[0] else None
    if re.search(_LASTS, match[0]):
        grace = 60.0
    return match.found(
        f"{match}: no node can take it ({match[0]})",
        f"{view.kubectl(f'describe pod {match.pods[0]}')} shows the scheduler's events",
        resolves_itself=None if grace is None else False,
        grace=grace,
    )


def _devices_not_allocated(view: JobView, match: Match) -> Found:
    """Describe pods whose claims of devices (dynamic resource allocation) the scheduler cannot have allocated."""
    return match.found(
        f"{match}: no node can give it the devices that it claims ({match[0]})",
        f"{view.kubectl('get resourceclaims')} shows the claims, and "
        f"{view.kubectl_of_cluster('get deviceclasses,resourceslices')} what the drivers of the nodes offer",
        resolves_itself=not match[1],
    )


CAUSES: Final = (
    Cause(
        "NodeBeingAdded",
        _node_being_added,
        cured_by="the autoscaler",
        patience=1800,  # a node takes a quarter of an hour at most, and its autoscaler may try another group
        awaits="the autoscaler",
    ),
    Cause(
        "NodeNotAddedNow",
        _node_not_added_now,
        cured_by="other jobs that end, or the autoscaler",
        awaits="the autoscaler, which can add no node now",
    ),
    Cause(
        "DevicesNotAllocated",
        found_by(scheduler_says(_DEVICES), _devices_not_allocated),
        grace=60,
        cured_by="other jobs that end",
        awaits="a driver of devices (dynamic resource allocation)",
    ),
    Cause(
        SHORT,
        found_by(_refused_by_nodes("resource"), _insufficient),
        grace=60,
        cured_by="other jobs that end",
        awaits="other jobs, or an autoscaler",
    ),
    Cause(
        "NodeSelectorMismatch",
        found_by(_refused_by_nodes("selector"), _selector),
        grace=60,
        awaits="a node with the labels",
    ),
    Cause(
        "NodesNotReady",
        tell(
            _nodes_not_ready,
            lambda view, match: f"{match}: the nodes that could run it are not ready or take no pods ({match[0]})",
            lambda view, match: (
                f"{view.kubectl_of_cluster('get nodes')} shows their state; the administrator of the cluster can bring "
                "them back"
            ),
        ),
        cured_by="nodes that come back",
        awaits="nodes that are away or cordoned",
    ),
    Cause(
        "TaintNotTolerated",
        tell(
            _refused_by_nodes("taint", lambda taint: not is_node_state(taint)),
            lambda view, match: (
                f"{match}: the nodes that could run it have {f'the taint {match[1]}' if match[1] else 'a taint'}, "
                "which the pods do not tolerate"
            ),
            lambda view, match: (
                f"submit with --toleration {match[1] or 'KEY'} if the job may run there; "
                f"{view.kubectl_of_cluster('describe nodes')} shows the taints"
            ),
        ),
        grace=60,
        awaits="a node without the taint",
    ),
    Cause(
        "SchedulerMissing",
        tell(
            _unseen,
            lambda view, match: (
                f"{match}: the scheduler {match[0]} has not looked at it; it may not exist in this cluster"
            ),
            lambda view, match: (
                f"have it started, or name one that runs with schedulerName in the job's patch; "
                f"{view.kubectl_of_cluster('get pods -n kube-system')} shows Kubernetes' own"
            ),
        ),
        grace=60,
        awaits="the scheduler",
    ),
)
# A group of its own, which counts only if no other cause concerns the pod: a cause about a volume is more specific.
UNSCHEDULABLE: Final = Cause(
    "Unschedulable",
    found_by(_refused_by_nodes(""), _no_node_takes),
    cured_by="other jobs that end",
    awaits="the scheduler, or whoever removes a scheduling gate",
)
