"""Communication: the collectives of one step under each strategy, the bytes that a rank sends, and their time.

A ring of n ranks sends (n - 1)/n of a tensor from each rank to reduce and scatter it or to gather it, and twice that to
reduce it for all. Sources: nccl-tests, doc/PERFORMANCE.md; ZeRO (arXiv 1910.02054), section 7; FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flk_plan.hardware import COLLECTIVE_SECONDS, DDP_BUCKET, LINK_EFFICIENCY, Gpu
from flk_plan.state import Unit
from flk_runtime.parallel.strategies import STRATEGIES


@dataclass(frozen=True)
class Cluster:
    """The ranks and the networks that connect them."""

    nodes: int
    gpus: int  # of each node; one rank for each
    gpu: Gpu
    network: float  # bytes per second and GPU between nodes
    fabric: str = "auto"  # name of the network between the nodes

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus

    def is_inside(self, ranks: int, stride: int) -> bool:
        """Return whether a ring of ``ranks`` ranks that are ``stride`` apart stays inside of one node."""
        return ranks * stride <= self.gpus

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second that a rank of such a ring sends.

        A ring through several nodes with several ranks in each uses all their network cards side by side. Rings with
        one rank in each node share the cards with the rings of the node's other ranks, so each has one.
        """
        if self.is_inside(ranks, stride):
            return self.gpu.link * LINK_EFFICIENCY
        return min(self.gpu.link, self.network * max(1, self.gpus // stride)) * LINK_EFFICIENCY


class When(enum.Enum):
    """The computation that has to wait for a collective."""

    FORWARD = "the unit's forward pass"
    BACKWARD = "the unit's backward pass"
    OPTIMIZER = "the optimizer's step"


class CollectiveKind(enum.Enum):
    """The kind of a collective."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True)
class Collective:
    """A collective of one unit, or of several that are sent together. ``sent`` is the bytes that each rank sends."""

    unit: Unit | None  # None: parameters of several
    when: When
    kind: CollectiveKind
    sent: float
    ranks: int
    stride: int  # distance between neighbouring ranks

    @property
    def full_bytes(self) -> float:
        """Bytes of the whole tensor."""
        rounds = 2 if self.kind is CollectiveKind.ALL_REDUCE else 1
        return self.sent / rounds * self.ranks / (self.ranks - 1)

    def seconds(self, cluster: Cluster) -> float:
        """How long it takes if nothing else is sent."""
        return COLLECTIVE_SECONDS + self.sent / cluster.bandwidth(self.ranks, self.stride)


def shard_count(strategy: str, cluster: Cluster, shard_size: int | None = None) -> int:
    """Number of ranks that share one copy of the model."""
    kind = STRATEGIES[strategy]
    if not kind.shards:
        return 1
    return (shard_size or cluster.gpus) if kind.replicates else cluster.world_size


def collectives(
    strategy: str,
    units: Sequence[Unit],
    world_size: int,
    shards: int,
    parameter_size: int | None = None,
    reduce_size: int | None = None,
) -> Iterator[Collective]:
    """The collectives of a step with one forward and one backward pass, in the order of ``units``.

    The sizes are bytes of an element of a parameter and of a gradient when it is sent; None: as they are kept.
    """
    if world_size == 1 or strategy == "none":
        return
    if not STRATEGIES[strategy].shards and parameter_size is None and reduce_size is None:
        yield from _bucketed(units, world_size)
        return
    kind = STRATEGIES[strategy]
    replicas = world_size // shards
    for unit in units:
        trained = any(each.trained for each in unit.parameters)
        gathered = unit.full_bytes(parameter_size, shards)
        reduced = unit.full_bytes(reduce_size, shards, trained_only=True)
        if shards > 1:
            share = (shards - 1) / shards
            yield Collective(unit, When.FORWARD, CollectiveKind.ALL_GATHER, gathered * share, shards, 1)
            if kind.reshards and not unit.is_kept:
                yield Collective(unit, When.BACKWARD, CollectiveKind.ALL_GATHER, gathered * share, shards, 1)
            if trained:
                yield Collective(unit, When.OPTIMIZER, CollectiveKind.REDUCE_SCATTER, reduced * share, shards, 1)
        if replicas > 1 and trained:
            share = 2 * (replicas - 1) / replicas
            yield Collective(
                unit, When.OPTIMIZER, CollectiveKind.ALL_REDUCE, reduced / shards * share, replicas, shards
            )


def _bucketed(units: Sequence[Unit], world_size: int) -> list[Collective]:
    """The all-reduces of DDP, which sends gradients together in the order in which they are ready; the last first.

    After its first backward pass DDP assigns gradients to buckets in that order. Source: Reducer::rebuild_buckets in
    torch/csrc/distributed/c10d/reducer.cpp.
    """
    share, ready = 2 * (world_size - 1) / world_size, 0
    found = []
    trained = [each for unit in units for each in unit.parameters if each.trained]
    for each in sorted(trained, key=lambda each: -each.place):
        ready += each.numel * each.size
        if ready >= DDP_BUCKET:
            found.append(ready)
            ready = 0
    found += [ready] * (ready > 0)
    sent = [Collective(None, When.OPTIMIZER, CollectiveKind.ALL_REDUCE, size * share, world_size, 1) for size in found]
    return sent[::-1]
