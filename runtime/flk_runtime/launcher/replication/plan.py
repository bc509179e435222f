"""The leader's plan for checkpoints in memory: which checkpoint is restored, and which pods hold copies.

Pure functions and data. A checkpoint is whole when the shards of all its ranks are held by members of the attempt, and
all shards were written in the same attempt, so shards of two states never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flk_runtime.contract.quantities import numbered

_MOST_RANKS = 1_000_000  # that are looked for: another launcher may say any number


class CheckpointId(NamedTuple):
    """A checkpoint in the memory of launchers."""

    written_in: str  # identifies the attempt that wrote it, among the attempts of all jobs
    step: int  # optimizer steps that it was taken after
    world_size: int  # number of its shards
    number: int  # the number of the save in that attempt: several saves may be after the same step


class ShardId(NamedTuple):
    """One rank's shard of a checkpoint."""

    checkpoint: CheckpointId
    rank: int


Copy = tuple[int, ShardId]  # a pod, and a shard that it holds


class Held(NamedTuple):
    """The ranks whose shards of a checkpoint a pod holds."""

    checkpoint: CheckpointId
    ranks: Sequence[int]


@dataclass(frozen=True)
class Inventory:
    """The shards in the memory of a pod, and its launcher's address; sent when the launcher joins an attempt."""

    host: str = ""  # address at which other launchers reach it
    port: int = 0
    held: list[Held] = field(default_factory=list)  # each checkpoint once: a leader reads the inventories of all pods

    @classmethod
    def of(cls, host: str, port: int, shards: Iterable[ShardId]) -> Inventory:
        """The inventory of a pod that holds these shards, whole."""
        held: dict[CheckpointId, list[int]] = {}
        for checkpoint, rank in sorted(shards):
            held.setdefault(checkpoint, []).append(rank)
        return cls(host, port, [Held(*each) for each in held.items()])

    @property
    def shards(self) -> list[ShardId]:
        """The shards that the pod holds."""
        return [ShardId(checkpoint, rank) for checkpoint, ranks in self.held for rank in ranks]


@dataclass(frozen=True)
class Restore:
    """A checkpoint in memory from which an attempt starts."""

    checkpoint: CheckpointId
    holders: dict[int, list[int]]  # by rank of the checkpoint: the pods that hold its shard
    doubtful: bool = False  # an earlier attempt could not read it, and there is no other


@dataclass(frozen=True)
class MemoryPlan:
    """What one pod has to know of the plan for checkpoints in memory in one attempt."""

    attempt_id: str  # identifies the attempt among the attempts of all jobs, also if the leader was replaced
    partner: int | None = None  # the pod that gets copies of this pod's shards; None in a job of one pod
    copied: int | None = None  # the pod of whose shards this pod gets copies
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Host and port of the launchers that this one connects to: of the partner, and of holders."""
    restore: Restore | None = None  # with the holders of those shards that ranks of this pod read
    others: list[CheckpointId] = field(default_factory=list)
    """Other whole checkpoints: an attempt that cannot read the first one falls back to them."""


@dataclass(frozen=True)
class JobPlan:
    """The plan for checkpoints in memory in one attempt, as the leader makes it."""

    attempt_id: str
    addresses: dict[int, tuple[str, int]]  # of the pods' launchers: host, port
    partners: dict[int, int]  # which pod gets copies of a pod's shards; empty in a job of one pod
    restore: Restore | None = None
    others: list[CheckpointId] = field(default_factory=list)

    def readers(self, ranks: Mapping[int, range]) -> list[int]:
        """The rank that reads each shard of the checkpoint to restore; empty: the one that wrote it."""
        same = self.restore is None or self.restore.checkpoint.world_size == sum(map(len, ranks.values()))
        return [] if self.restore is None or same else readers(self.restore, ranks)

    def slices(self, ranks: Mapping[int, range], readers: Sequence[int]) -> Iterator[tuple[int, MemoryPlan]]:
        """The part of the plan for each pod, made one after the other, since all of them together take much memory.

        ``ranks`` are by pod, and ``readers`` as `readers` returns them.
        """
        read: Mapping[int, Sequence[int]] = ranks if self.restore else {}  # shards, by the pod that reads them
        if readers:
            pods = {rank: pod for pod, own in ranks.items() for rank in own}
            lists: dict[int, list[int]] = {pod: [] for pod in ranks}
            for shard, reader in enumerate(readers):
                lists[pods[reader]].append(shard)
            read = lists
        copied = {partner: pod for pod, partner in self.partners.items()}
        for pod in ranks:
            yield pod, self._slice(pod, copied.get(pod), read.get(pod, ()))

    def _slice(self, pod: int, copied: int | None, shards: Sequence[int]) -> MemoryPlan:
        restore, partner = self.restore, self.partners.get(pod)
        if restore:
            restore = replace(restore, holders={shard: restore.holders[shard] for shard in shards})
        asked = {holder for holders in (restore.holders.values() if restore else ()) for holder in holders}
        if partner is not None:
            asked.add(partner)
        addresses = {each: self.addresses[each] for each in sorted(asked - {pod})}
        return MemoryPlan(self.attempt_id, partner, copied, addresses, restore, self.others)


def newest_whole(inventories: Mapping[int, Inventory], unreadable: Set[Copy] = frozenset()) -> Restore | None:
    """The newest whole checkpoint: these pods together hold all its shards. None if there is none.

    Copies that could not be read count only if there is no whole checkpoint without them.
    """
    holders = _holders(inventories)
    return _newest_whole(holders, _holders(inventories, unreadable) if unreadable else holders)


_Holders = dict[CheckpointId, dict[int, tuple[int, ...]]]  # pods by checkpoint and rank


def _newest_whole(holders: _Holders, readable: _Holders) -> Restore | None:
    whole = _whole(readable)
    doubtful = not whole
    if doubtful:
        whole, readable = _whole(holders), holders
    if not whole:
        return None
    latest = {each.written_in: each for each in sorted(whole, key=lambda each: each.number)}  # of each attempt
    # Two attempts' checkpoints after the same step are of the same training: the one with more copies is safer.
    best = max(latest.values(), key=lambda each: (each.step, sum(map(len, readable[each].values())), each.written_in))
    return Restore(best, {rank: list(pods) for rank, pods in sorted(readable[best].items())}, doubtful)


def _holders(inventories: Mapping[int, Inventory], unreadable: Set[Copy] = frozenset()) -> _Holders:
    holders: _Holders = {}
    for pod, inventory in sorted(inventories.items()):
        for checkpoint, ranks in inventory.held:
            of_rank = holders.setdefault(checkpoint, {})
            for rank in ranks:
                if not unreadable or (pod, ShardId(checkpoint, rank)) not in unreadable:
                    of_rank[rank] = (*of_rank.get(rank, ()), pod)
    return holders


def _whole(holders: _Holders) -> list[CheckpointId]:
    full = [each for each, shards in holders.items() if len(shards) == each.world_size > 0]
    return [each for each in full if all(0 <= rank < each.world_size for rank in holders[each])]


def _newest_partial(holders: _Holders) -> tuple[int, list[int]] | None:
    """Step and missing ranks of the checkpoint that would have been the newest; None if nobody holds any shard."""
    some = [checkpoint for checkpoint, ranks in holders.items() if ranks]
    if not some:
        return None
    newest = max(some, key=lambda each: (each.step, each.number, each.written_in))
    return newest.step, [rank for rank in range(min(newest.world_size, _MOST_RANKS)) if rank not in holders[newest]]


def partners(nodes: Mapping[int, str]) -> dict[int, int]:
    """The pod that holds copies of each pod's shards, given the pods' nodes: on another node where that is possible.

    Each pod holds the copies of one other pod. In the list of pods, sorted by node, a pod's partner comes as many
    places later as the largest node has pods: if no node has more than half of the pods, all partners are on two nodes.
    """
    if len(nodes) < 2:
        return {}
    sizes: dict[str, int] = {}
    for node in nodes.values():
        sizes[node] = sizes.get(node, 0) + 1
    order = sorted(nodes, key=lambda pod: (-sizes[nodes[pod]], nodes[pod], pod))
    shift = max(sizes.values())
    shift = 1 if shift == len(nodes) else shift
    return {pod: order[(index + shift) % len(order)] for index, pod in enumerate(order)}


def readers(restore: Restore, ranks: Mapping[int, range]) -> list[int]:
    """The rank that reads each shard of the checkpoint to restore, and whose pod keeps the shard. ``ranks`` are by pod.

    A rank reads the shard that it wrote, also if its pod has to fetch the shard. If the number of ranks has changed,
    the shards are spread over the pods that hold them.
    """
    world_size = restore.checkpoint.world_size
    if world_size == sum(map(len, ranks.values())):
        return list(range(world_size))
    load = dict.fromkeys(ranks, 0)
    found = []
    for holders in restore.holders.values():
        pod = min([pod for pod in holders if pod in load] or load, key=lambda each: (load[each], each))
        found.append(ranks[pod][load[pod] % len(ranks[pod])])
        load[pod] += 1
    return found


def copied_to_partner(plan: MemoryPlan, pod: int, world_size: int) -> list[ShardId]:
    """The shards of the checkpoint to restore that this pod sends to its partner before anything is saved.

    So two pods hold each shard, also after one of them was lost, and after the partners have changed.
    """
    restore = plan.restore
    if restore is None:
        return []
    same = restore.checkpoint.world_size == world_size
    return [
        ShardId(restore.checkpoint, shard)
        for shard, holders in restore.holders.items()
        if plan.partner not in holders and (same or holders == [pod])
    ]


def make_plan(
    attempt_id: str,
    inventories: Mapping[int, Inventory | None],
    nodes: Mapping[int, str],
    unreadable: Set[Copy] = frozenset(),
) -> tuple[JobPlan | None, str]:
    """The plan of an attempt for checkpoints in memory, and a line about what is lost, which may be empty.

    ``unreadable`` are copies that earlier attempts could not read.

    ``nodes`` are the nodes of the pods that take part. ``inventories`` may be of more pods: a pod that waits can give
    the shards that it holds. There is no plan if a pod that takes part keeps no checkpoints in memory.
    """
    known = {pod: inventory for pod, inventory in inventories.items() if inventory}
    without = [pod for pod in nodes if pod not in known]
    if without:
        return None, f"no checkpoints are kept in memory, because pod {min(without)} keeps none" if known else ""
    holders = _holders(known)  # the shards of all ranks
    restore = _newest_whole(holders, _holders(known, unreadable) if unreadable else holders)
    others = [each for each in _whole(holders) if restore and each != restore.checkpoint]
    addresses = {pod: (inventory.host, inventory.port) for pod, inventory in known.items()}
    plan = JobPlan(attempt_id, addresses, partners(nodes), restore, others)
    newer = [each.step for each in others if restore and each.step > restore.checkpoint.step]
    if restore and newer:
        step = restore.checkpoint.step
        return plan, f"the checkpoint in memory after step {max(newer)} could not be read: step {step} is restored"
    partial = _newest_partial(holders)
    if partial is None or restore:
        return plan, ""
    step, ranks = partial
    which = numbered("rank", ranks)
    lost = f"the shard of {which} is lost" if len(ranks) == 1 else f"the shards of {which} are lost"
    return plan, f"the checkpoint in memory after step {step} is incomplete: {lost}"
