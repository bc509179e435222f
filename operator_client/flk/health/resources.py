"""Resources: the requests of pods, the capacity of nodes, and which nodes may run which pods."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flk.kube import Object
from flk.observe.model import Evidence
from flk.observe.needs import volume_name
from flk.observe.pods import claims_of
from flk.observe.view import JobView
from flk.units import parse_quantity
from flk_runtime.contract.quantities import plural

Amounts = dict[str, float]  # by resource name; cores, bytes or a number
# Taints of nodes that report a fault: of NVSentinel, and as its guides name them.
FAULT_TAINT: Final = re.compile(
    r"AggregatedNodeHealth\b|GPUHealth\b|nvidia\.com/\S+-error\b|(gpu|nvlink|nvswitch)\.health/"
)
# Taints of nodes that are not ready or go away: of Kubernetes, its cloud controllers and autoscalers.
_NODE_STATE: Final = re.compile(
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


def fitting(free: Amounts, needed: Amounts) -> tuple[int, str]:
    """Return how many pods fit into free amounts, and the resource that allows no more."""
    needed = {**{name: amount for name, amount in needed.items() if amount > 0}, "pods": 1.0}
    # Memory in bytes and thousandths of cores are whole numbers; a small margin covers the division of others.
    counts = {name: math.floor(free.get(name, 0.0) / amount + 1e-9) for name, amount in needed.items()}
    scarce = min(counts, key=lambda name: counts[name])
    return max(0, counts[scarce]), scarce


def is_selected(node: Object, spec: Object) -> bool:
    """Return whether a node has the labels of a pod's node selector, and matches its required node affinity."""
    labels = node["metadata"].get("labels") or {}
    return _matches_one(node, _node_terms(spec)) and (spec.get("nodeSelector") or {}).items() <= labels.items()


def may_use_volume(node: Object, volume: Object) -> bool:
    """Return whether a PersistentVolume can be used on a node: by the labels that its node affinity requires."""
    return _matches_one(node, _terms_of_volume(volume))


def _matches_one(node: Object, terms: Sequence[Object]) -> bool:
    """Return whether a node matches one of the terms of a node affinity; without terms each node does."""
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    return not terms or any(
        all(_matches(labels, each) for each in term.get("matchExpressions") or [])
        and all(_matches(fields, each) for each in term.get("matchFields") or [])
        for term in terms
    )


def node_affinity_text(spec: Object) -> str:
    """Return the required node affinity of a pod in a few words; empty if it has none."""
    return _terms_text(_node_terms(spec))


def volume_affinity_text(volume: Object) -> str:
    """Return the node affinity of a PersistentVolume in a few words; empty if it has none."""
    return _terms_text(_terms_of_volume(volume))


def _terms_text(terms: Sequence[Object]) -> str:
    texts = []
    for term in terms:
        parts = (
            f"{e.get('key')} {e.get('operator')} {', '.join(e.get('values') or [])}".strip()
            for e in (*(term.get("matchExpressions") or []), *(term.get("matchFields") or []))
        )
        texts.append(" and ".join(parts))
    return " or ".join(texts)


def _terms_of_volume(volume: Object) -> list[Object]:
    affinity = (volume.get("spec") or {}).get("nodeAffinity") or {}
    return (affinity.get("required") or {}).get("nodeSelectorTerms") or []


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
    return bool(_NODE_STATE.match(taint) or FAULT_TAINT.match(taint))


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


@dataclass(frozen=True)
class BoundVolume:
    """A volume that can be used on some nodes only."""

    claim: str
    volume: Object  # the PersistentVolume
    nodes: Sequence[Object]  # all nodes of the cluster on which it can be used

    @property
    def is_away(self) -> bool:
        """Whether all its nodes are cordoned, not ready or going away, so that they may come back."""
        return bool(self.nodes) and all(map(_is_away, self.nodes))

    def __str__(self) -> str:
        """Where the volume is, as part of a sentence."""
        names = [str(node["metadata"]["name"]) for node in self.nodes]
        if not names:
            where = f"a node that does not exist ({volume_affinity_text(self.volume)})"
        elif len(names) == 1:
            where = f"node {names[0]}{', which is cordoned' if is_cordoned(self.nodes[0]) else ''}"
        else:
            where = f"{plural(len(names), 'node')}, such as {names[0]}"
        return f"the volume of the claim {self.claim} is on {where}"

    @property
    def evidence(self) -> Evidence:
        """The node affinity of the volume."""
        source = f"PersistentVolume {self.volume['metadata']['name']}"
        return Evidence(source, volume_affinity_text(self.volume), "spec.nodeAffinity")


def bound_volumes(view: JobView, pod: str) -> Iterator[BoundVolume]:
    """Yield the volumes of a pod that not all nodes can use, as far as volumes and nodes could be read."""
    nodes = view.seen.nodes.values()
    for name in claims_of(view.objects[pod]) if nodes else ():
        volume = view.seen.volumes.get(volume_name(view.seen.claims.get(name)))
        if volume is not None and volume_affinity_text(volume):
            yield BoundVolume(name, volume, [node for node in nodes if may_use_volume(node, volume)])


def _is_away(node: Object) -> bool:
    return is_cordoned(node) or any(map(is_node_state, untolerated(node, {})))
