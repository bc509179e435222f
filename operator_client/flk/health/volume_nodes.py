"""The nodes on which the volumes of a pod can be used: those that the PersistentVolumes of its claims name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flk.health.resources import is_cordoned, is_node_state, may_use_volume, untolerated, volume_affinity_text
from flk.kube import Object
from flk.observe.model import Evidence
from flk.observe.needs import volume_name
from flk.observe.pods import claims_of
from flk.observe.view import JobView
from flk_runtime.contract.ranges import plural


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
