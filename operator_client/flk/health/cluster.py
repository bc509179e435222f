"""What the checks before a job exists read and return, and which nodes may run which pods."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Final

from flk.kube import Object, Resource
from flk.observe.pods import claims_of
from flk.spec import labels
from flk.spec.units import parse_quantity
from flk.targets import DEFAULT, Target, target_of
from flk.targets.gang import Gang, gang_of
from flk.user.commands import Commands
from flk_runtime.contract.values import dataclass, field

Amounts = dict[str, float]  # by resource name; cores, bytes or a number
# Taints of nodes that report a fault: of NVSentinel, and as its guides name them.
FAULT_TAINT: Final = r"AggregatedNodeHealth\b|GPUHealth\b|nvidia\.com/\S+-error\b|(gpu|nvlink|nvswitch)\.health/"
# Taints of nodes that are not ready or go away: of Kubernetes, its cloud controllers and autoscalers.
_NODE_STATE: Final = (
    r"node(\.cloudprovider)?\.kubernetes\.io/|karpenter\.sh/(disrupted|unregistered)\b|ToBeDeletedByClusterAutoscaler\b"
)
_BLOCKING: Final = ("NoSchedule", "NoExecute")
_BINARY: Final = (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def quantity(value: Any) -> float:
    """Return a quantity of Kubernetes as a number; 0 for anything else."""
    try:
        return float(parse_quantity(str(value)))
    except ValueError:
        return 0.0


def amount_text(resource: str, amount: float) -> str:
    """Return an amount as people write it: ``4``, ``1.5``, and ``16Gi`` for memory."""
    if "memory" in resource or "storage" in resource or "hugepages" in resource:
        for unit, scale in _BINARY:
            if abs(amount) >= scale:
                return f"{amount / scale:.4g}{unit}"
    return f"{amount:.6g}"


def is_accelerator(name: str) -> bool:
    """Return whether a resource is a GPU or something like it."""
    return "/" in name and name.rpartition("/")[2].partition("-")[0] in ("gpu", "tpu", "npu", "neuron", "mig", "gaudi")


def requests(spec: Object) -> Amounts:
    """Return the amounts that the scheduler reserves for a pod: its requests; if only limits are set, its limits."""
    total: Amounts = {}
    for container in spec.get("containers") or []:
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] = total.get(name, 0.0) + quantity(amount)
    return total


def allocatable(node: Object) -> Amounts:
    """Return the allocatable resources of a node."""
    return {name: quantity(value) for name, value in ((node.get("status") or {}).get("allocatable") or {}).items()}


def fitting(free: Amounts, needed: Amounts) -> int:
    """Return how many pods fit into free amounts."""
    needed = {**{name: amount for name, amount in needed.items() if amount > 0}, "pods": 1.0}
    # Memory in bytes and thousandths of cores are whole numbers; a small margin covers the division of others.
    return max(0, min(math.floor(free.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items()))


def is_selected(node: Object, spec: Object) -> bool:
    """Return whether a node has the labels of a pod's node selector, and matches its required node affinity."""
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    terms = _node_terms(spec)  # of which one suffices
    matches = not terms or any(
        all(_matches(labels, each) for each in term.get("matchExpressions") or [])
        and all(_matches(fields, each) for each in term.get("matchFields") or [])
        for term in terms
    )
    return matches and (spec.get("nodeSelector") or {}).items() <= labels.items()


def node_affinity_text(spec: Object) -> str:
    """Return the required node affinity of a pod in a few words; empty if it has none."""
    texts = []
    for term in _node_terms(spec):
        parts = (
            f"{e.get('key')} {e.get('operator')} {', '.join(e.get('values') or [])}".strip()
            for e in (*(term.get("matchExpressions") or []), *(term.get("matchFields") or []))
        )
        texts.append(" and ".join(parts))
    return " or ".join(texts)


def _node_terms(spec: Object) -> list[Object]:
    """Return the terms of the required node affinity of a pod, of which a node has to match one."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    return (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []


def _matches(labels: Object, expression: Object) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:  # Gt and Lt
            return True


def is_cordoned(node: Object) -> bool:
    """Return whether a node takes no new pods."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def untolerated(node: Object, spec: Object) -> Iterator[str]:
    """Yield the taints of a node that keep a pod away, as ``key=value:effect``."""
    for taint in (node.get("spec") or {}).get("taints") or []:
        if taint.get("effect") in _BLOCKING and not any(_tolerates(t, taint) for t in spec.get("tolerations") or []):
            yield taint_text(taint)


def taint_text(taint: Object) -> str:
    """Return a taint as ``key=value:effect``."""
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def is_node_state(taint: str) -> bool:
    """Return whether a taint, as ``key=value:effect``, says that its node is broken, not ready or going away."""
    return bool(re.match(_NODE_STATE, taint) or re.match(FAULT_TAINT, taint))


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or "")


def is_allowed(node: Object, spec: Object, *, when_back: bool = False) -> bool:
    """Return whether a node may run a pod: by its labels and taints, and because it is not cordoned.

    ``when_back`` asks for the time when the node is ready and takes pods again.
    """
    taints = [taint for taint in untolerated(node, spec) if not (when_back and is_node_state(taint))]
    return is_selected(node, spec) and not taints and (when_back or not is_cordoned(node))


_REASON: Final = r"(\d+) (.+?)(?=(?:, \d+ )|[.;]? preemption:|\.?$|\. )"
_TAINT: Final = r"untolerated taint(?:\(s\))?(?: \{([^}:]+)(?:: ?([^}]*))?\})?"
_INSUFFICIENT: Final = r"^Too many (pods)|Insufficient (\S+?)\.?$"
_CONTROL_TAINTS: Final = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
# The scheduler tests a node in this order and reports the first test that the node fails, so a node that fails a later
# test is closer to taking the pod.
_ORDER: Final = ("unschedulable", "taint", "selector", "ports", "resource", "volume", "other")


@dataclass(frozen=True)
class NodeReason:
    """Why some nodes cannot take a pod."""

    kind: str  # one of _ORDER
    nodes: int  # how many nodes say so
    text: str  # as the scheduler writes it
    detail: str = ""  # the resource, or the taint as key=value; newer schedulers do not name the taint


def node_reasons(message: str) -> list[NodeReason]:
    """Return the scheduler's reasons in a message like ``0/3 nodes are available: 1 Insufficient cpu, 2 node(s) …``.

    The reason of the nodes that came closest to taking the pod is the first one. Control planes, which do not take
    other pods, are left out where other nodes have a reason.
    """
    head, _, rest = message.partition(" available: ")
    if "nodes are" not in head:
        return []
    rest = rest.partition(" preemption:")[0]
    reasons = [_reason(int(count), text.strip().rstrip(".")) for count, text in re.findall(_REASON, rest)]
    others = [r for r in reasons if not (r.kind == "taint" and r.detail.startswith(_CONTROL_TAINTS))]
    return sorted(others or reasons, key=lambda r: (-_ORDER.index(r.kind), -r.nodes))


def _reason(nodes: int, text: str) -> NodeReason:
    taint = re.search(_TAINT, text)
    if taint:
        value = (taint[2] or "").strip()
        return NodeReason("taint", nodes, text, f"{taint[1]}={value}" if value else taint[1] or "")
    insufficient = re.search(_INSUFFICIENT, text)
    if insufficient:
        return NodeReason("resource", nodes, text, insufficient[1] or insufficient[2])
    for kind, words in (
        ("selector", ("node affinity/selector", "node selector", "didn't match Pod's node affinity")),
        ("volume", ("PersistentVolume", "persistentvolumeclaim", "volume")),
        ("ports", ("free ports",)),
        ("unschedulable", ("were unschedulable", "not ready")),
    ):
        if any(word in text for word in words):
            return NodeReason(kind, nodes, text)
    return NodeReason("other", nodes, text)


class Level(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # the job can run, but perhaps not now or not well
    FAILED = "failed"  # the job cannot run
    UNKNOWN = "unknown"  # the objects that the check needs could not be read


@dataclass(frozen=True)
class Result:
    """The result of one check: its level, one sentence, and a remedy."""

    check: str
    level: Level
    found: str
    remedy: str = ""
    code: str = ""  # of the cause that the job would have; empty where there is none


@dataclass(frozen=True)
class Unreadable:
    """An object or a list that could not be read: it does not exist (``missing``), or the request failed."""

    reason: str
    missing: bool = False
    remedy: str = ""  # where the error has one
    causes: Sequence[str] = ()  # of the refusal, in the API's words

    def result(self, check: str, found: str, remedy: str = "", code: str = "", *, unread: str) -> Result:
        """Return the result of a check that needs it: ``found`` if it is missing, else ``unread`` and the reason."""
        if self.missing:
            return Result(check, Level.FAILED, found, remedy, code)
        return Result(check, Level.UNKNOWN, f"{unread}: {self.reason}")


@dataclass(frozen=True)
class Cluster:
    """Everything that was read of a cluster and of one namespace in it. Objects are dicts of the API's JSON."""

    namespace: str
    commands: Commands  # makes the commands that are suggested
    version: Object | Unreadable  # of the API server
    api: Resource | Unreadable  # the target's objects, in the version that the cluster serves
    controllers: Mapping[str, Sequence[Object] | Unreadable]  # Deployments of the target's controllers, by check
    rights: Mapping[tuple[str, str], bool] | Unreadable  # by verb and resource: whether the user may do it
    nodes: Sequence[Object] | Unreadable
    pending: Sequence[Object] | Unreadable  # pods of the namespace that do not run yet
    autoscaler: str = ""  # who may add nodes; empty: nobody is known to
    # Only with a job: the objects that its pods name, by kind and name, as ("secrets", "wandb").
    named: Mapping[tuple[str, str], Object | Unreadable] = field(default_factory=dict)
    target: Target = DEFAULT  # the target of jobs
    gang: Gang | None = None  # the gang scheduler of the job
    gang_api: Resource | Unreadable | None = None  # its PodGroups; None: no gang
    runtime: Object | Unreadable | None = None  # flk's ClusterTrainingRuntime; None: the target needs none
    admission: Object | Unreadable | None = None  # a pod of the job as the API server would admit it; None: not tried
    accepted: Object | Unreadable | None = None  # a ConfigMap as it would be created in the namespace; None: not tried


class Pods:
    """The requests and references of a job's pods, read from its manifest; all pods are equal."""

    def __init__(self, manifest: Object) -> None:
        self.manifest = manifest
        self.target = target_of(manifest)
        self.gang = gang_of(manifest)
        roles = [*self.target.replicas(manifest).values()]
        self.count = sum(role.count for role in roles)
        self.template: Object = roles[0].template
        self.spec: Object = self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        """The containers of a pod, without those that initialize it."""
        return list(self.spec.get("containers") or [])

    @cached_property
    def requests(self) -> Amounts:
        """The amounts that the scheduler reserves for one pod."""
        return requests(self.spec)

    @property
    def claims(self) -> list[str]:
        """Names of the PersistentVolumeClaims that the pods mount."""
        return sorted(set(claims_of(self.template)))

    @property
    def mounted(self) -> list[tuple[str, str]]:
        """The objects whose keys the pods mount as files: ``secrets`` or ``configmaps``, and the name."""
        found = set()
        for volume in self.spec.get("volumes") or []:
            secret, config_map = volume.get("secret") or {}, volume.get("configMap") or {}
            for kind, name, source in (
                ("secrets", secret.get("secretName"), secret),
                ("configmaps", config_map.get("name"), config_map),
            ):
                if name and not source.get("optional"):
                    found.add((kind, str(name)))
        return sorted(found)

    @property
    def pull_secrets(self) -> list[str]:
        """Names of the Secrets with which nodes pull the images."""
        return sorted({str(secret.get("name")) for secret in self.spec.get("imagePullSecrets") or []})

    @property
    def queue(self) -> str:
        """Name of the job's Kueue queue; empty for none."""
        return str(labels.of(self.manifest).get(labels.QUEUE) or "")

    @property
    def named(self) -> list[tuple[str, str]]:
        """Kind (in plural) and name of every object that the pods name."""
        found = [("persistentvolumeclaims", name) for name in self.claims]
        found += [("secrets", name) for name in self.pull_secrets]
        found += [*self.mounted, *((kind, name) for kind, name, _ in self.keys)]
        if self.queue:
            found.append(("localqueues", self.queue))
        return sorted(set(found))

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """The keys that the environment takes from objects: ``secrets`` or ``configmaps``, the name, the key."""
        found = []
        for container in self.containers:
            for variable in container.get("env") or []:
                source = variable.get("valueFrom") or {}
                for field_name, kind in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
                    reference = source.get(field_name)
                    if reference and not reference.get("optional"):
                        found.append((kind, str(reference["name"]), str(reference["key"])))
        return sorted(set(found))
