"""Parse the scheduler's message about a pod that no node can take, and tell which reason stands in the way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_REASON: Final = re.compile(r"(\d+) (.+?)(?=(?:, \d+ )|[.;]? preemption:|\.?$|\. )")
_TAINT: Final = re.compile(r"untolerated taint(?:\(s\))?(?: \{([^}:]+)(?:: ?([^}]*))?\})?")
_INSUFFICIENT: Final = re.compile(r"Insufficient (\S+?)\.?$")
_CONTROL_PLANE: Final = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
# The scheduler tests a node in this order and reports the first test that the node fails, so a node that fails a later
# test is closer to taking the pod.
_ORDER: Final = (
    "unschedulable",
    "taint",
    "selector",
    "ports",
    "resource",
    "volume",
    "spread",
    "affinity",
    "claims",
    "other",
)


@dataclass(frozen=True)
class NodeReason:
    """Why some nodes cannot take a pod."""

    kind: str  # one of _ORDER
    nodes: int  # how many nodes say so
    text: str  # as the scheduler writes it
    detail: str = ""  # the resource, or the taint as key=value; newer schedulers do not name the taint


def parse(message: str) -> list[NodeReason]:
    """Return the reasons in a message like ``0/3 nodes are available: 1 Insufficient cpu, 2 node(s) …``.

    The reason of the nodes that came closest to taking the pod is the first one. Control planes, which do not take
    other pods, are left out where other nodes have a reason.
    """
    head, _, rest = message.partition(" available: ")
    if "nodes are" not in head:
        return []
    rest = rest.partition(" preemption:")[0]
    reasons = [_reason(int(count), text.strip().rstrip(".")) for count, text in _REASON.findall(rest)]
    others = [r for r in reasons if not (r.kind == "taint" and r.detail.startswith(_CONTROL_PLANE))]
    return sorted(others or reasons, key=lambda r: (-_ORDER.index(r.kind), -r.nodes))


def _reason(nodes: int, text: str) -> NodeReason:
    taint = _TAINT.search(text)
    if taint:
        value = (taint[2] or "").strip()
        return NodeReason("taint", nodes, text, f"{taint[1]}={value}" if value else taint[1] or "")
    insufficient = _INSUFFICIENT.search(text)
    if insufficient:
        return NodeReason("resource", nodes, text, insufficient[1])
    if text.startswith("Too many pods"):
        return NodeReason("resource", nodes, text, "pods")
    for kind, words in (
        ("claims", ("cannot allocate all claims", "resourceclaim")),
        ("selector", ("node affinity/selector", "node selector", "didn't match Pod's node affinity")),
        (
            "volume",
            ("volume node affinity", "PersistentVolume", "unbound immediate", "persistentvolumeclaim", "volume"),
        ),
        ("affinity", ("pod affinity", "anti-affinity")),
        ("spread", ("topology spread",)),
        ("ports", ("free ports",)),
        ("unschedulable", ("were unschedulable", "not ready")),
    ):
        if any(word in text for word in words):
            return NodeReason(kind, nodes, text)
    return NodeReason("other", nodes, text)
