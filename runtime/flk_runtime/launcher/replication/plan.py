"""The leader's plan for checkpoints in memory: which checkpoint is restored, and which pods hold copies.

Pure functions and data. A checkpoint is whole when the shards of all its ranks are held by members of the attempt, and
all shards were written in the same attempt, so shards of two states never meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from flk_runtime.contract.ranges import numbered

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


@dataclass(frozen=True)
class Inventory:
    """The shards in the memory of a pod, and its launcher's address; sent when the launcher joins an attempt."""

    host: str = ""  # address at which other launchers reach it
    port: int = 0
    shards: list[ShardId] = field(default_factory=list)  # that it holds, whole


@dataclass(frozen=True)
class Restore:
    """A checkpoint in memory from which an attempt starts."""

    checkpoint: CheckpointId
    holders: list[list[int]]  # by rank of the checkpoint: the pods that hold its shard
    doubtful: bool = False  # an earlier attempt could not read it, and there is no other


@dataclass(frozen=True)
class MemoryPlan:
    """The plan for checkpoints in memory in one attempt, the same for all launchers."""

    attempt_id: str  # identifies the attempt among the attempts of all jobs, also if the leader was replaced
    addresses: dict[int, tuple[str, int]]  # of the pods' launchers: host, port
    partners: dict[int, int]  # which pod gets copies of a pod's shards; empty in a job of one pod
    restore: Restore | None = None
    others: list[CheckpointId] = field(default_factory=list)
    """Other whole checkpoints: an attempt that cannot read the first one falls back to them."""


def newest_whole(inventories: Mapping[int, Inventory], unreadable: Set[Copy] = frozenset()) -> Restore | None:
    """The newest whole checkpoint: these pods together hold all its shards. None if there is none.

    Copies that could not be read count only if there is no whole checkpoint without them.
    """
    holders = _holders(inventories)
    readable = _holders(inventories, unreadable)
    whole = _whole(readable)
    doubtful = not whole
    if doubtful:
        whole, readable = _whole(holders), holders
    if not whole:
        return None
    latest = {each.written_in: each for each in sorted(whole, key=lambda each: each.number)}  # of each attempt
    # Two attempts' checkpoints after the same step are of the same training: the one with more copies is safer.
    best = max(latest.values(), key=lambda each: (each.step, sum(map(len, readable[each].values())), each.written_in))
    return Restore(best, [readable[best][rank] for rank in range(best.world_size)], doubtful)


_Holders = dict[CheckpointId, dict[int, list[int]]]  # pods by checkpoint and rank


def _holders(inventories: Mapping[int, Inventory], unreadable: Set[Copy] = frozenset()) -> _Holders:
    holders: _Holders = {}
    for pod, inventory in sorted(inventories.items()):
        for shard in inventory.shards:
            if (pod, shard) not in unreadable:
                holders.setdefault(shard.checkpoint, {}).setdefault(shard.rank, []).append(pod)
    return holders


def _whole(holders: _Holders) -> list[CheckpointId]:
    full = [each for each, shards in holders.items() if len(shards) == each.world_size]
    return [each for each in full if sorted(holders[each]) == list(range(each.world_size))]


def newest_partial(inventories: Mapping[int, Inventory]) -> tuple[int, list[int]] | None:
    """Step and missing ranks of the checkpoint that would have been the newest; None if nobody holds any shard."""
    shards = {shard for inventory in inventories.values() for shard in inventory.shards}
    if not shards:
        return None
    newest = max((shard.checkpoint for shard in shards), key=lambda each: (each.step, each.number, each.written_in))
    held = {shard.rank for shard in shards if shard.checkpoint == newest}
    return newest.step, [rank for rank in range(min(newest.world_size, _MOST_RANKS)) if rank not in held]


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
    for holders in restore.holders:
        pod = min([pod for pod in holders if pod in load] or load, key=lambda each: (load[each], each))
        found.append(ranks[pod][load[pod] % len(ranks[pod])])
        load[pod] += 1
    return found


def copied_to_partner(restore: Restore, ranks: Mapping[int, range], pod: int, partner: int | None) -> list[ShardId]:
    """The shards of the checkpoint to restore that this pod sends to its partner before anything is saved.

    So two pods hold each shard, also after one of them was lost, and after the partners have changed.
    """
    same = restore.checkpoint.world_size == sum(map(len, ranks.values()))
    return [
        ShardId(restore.checkpoint, shard)
        for shard, reader in enumerate(readers(restore, ranks))
        if reader in ranks[pod] and partner not in (holders := restore.holders[shard]) and (same or holders == [pod])
    ]


def make_plan(
    attempt_id: str,
    inventories: Mapping[int, Inventory | None],
    nodes: Mapping[int, str],
    unreadable: Set[Copy] = frozenset(),
) -> tuple[MemoryPlan | None, str]:
    """The plan of an attempt for checkpoints in memory, and a line about what is lost, which may be empty.

    ``unreadable`` are copies that earlier attempts could not read.

    ``nodes`` are the nodes of the pods that take part. ``inventories`` may be of more pods: a pod that waits can give
    the shards that it holds. There is no plan if a pod that takes part keeps no checkpoints in memory.
    """
    known = {pod: inventory for pod, inventory in inventories.items() if inventory}
    without = [pod for pod in nodes if pod not in known]
    if without:
        return None, f"no checkpoints are kept in memory, because pod {min(without)} keeps none" if known else ""
    restore = newest_whole(known, unreadable)
    others = [each for each in _whole(_holders(known)) if restore and each != restore.checkpoint]
    addresses = {pod: (inventory.host, inventory.port) for pod, inventory in known.items()}
    plan = MemoryPlan(attempt_id, addresses, partners(nodes), restore, others)
    newer = [each.step for each in others if restore and each.step > restore.checkpoint.step]
    if restore and newer:
        step = restore.checkpoint.step
        return plan, f"the checkpoint in memory after step {max(newer)} could not be read: step {step} is restored"
    partial = newest_partial(known)
    if partial is None or restore:
        return plan, ""
    step, ranks = partial
    which = numbered("rank", ranks)
    lost = f"the part of {which} is lost" if len(ranks) == 1 else f"the parts of {which} are lost"
    return plan, f"the checkpoint in memory after step {step} is incomplete: {lost}"
