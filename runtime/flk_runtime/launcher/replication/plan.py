"""The leader's plan for checkpoints in memory: which checkpoint is restored, and which pods hold copies.

Pure functions and data. A checkpoint is whole when the shards of all its ranks are held by members of the attempt, and
all shards were written in the same attempt, so shards of two states never meet.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple


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

    def copied_at_first(self, pod: int, world_size: int) -> list[ShardId]:
        """The shards of the checkpoint to restore that this pod sends to its partner before anything is saved.

        So two pods hold each shard, also after one of them was lost, and after the partners have changed.
        """
        if self.restore is None:
            return []
        same = self.restore.checkpoint.world_size == world_size
        return [
            ShardId(self.restore.checkpoint, shard)
            for shard, holders in self.restore.holders.items()
            if self.partner not in holders and (same or holders == [pod])
        ]


@dataclass(frozen=True)
class JobPlan:
    """The plan for checkpoints in memory in one attempt, as the leader makes it."""

    attempt_id: str
    addresses: dict[int, tuple[str, int]]  # of the pods' launchers: host, port
    partners: dict[int, int]  # which pod gets copies of a pod's shards; empty in a job of one pod
    readers: list[int]
    """The rank that reads each shard of the checkpoint to restore; empty: the rank that wrote it."""
    restore: Restore | None = None
    others: list[CheckpointId] = field(default_factory=list)

    def slices(self, pods: Sequence[int], processes: int) -> Iterator[tuple[int, MemoryPlan]]:
        """The part of the plan for each pod, made one after the other, since all of them together take much memory.

        ``pods`` take part, in the order of their ranks, with ``processes`` ranks each.
        """
        shards: dict[int, list[int]] = {pod: [] for pod in pods}  # by the pod that reads them
        holders = self.restore.holders if self.restore else {}
        for shard in holders:
            reader = self.readers[shard] if self.readers else shard
            shards[pods[reader // processes]].append(shard)
        copied = {partner: pod for pod, partner in self.partners.items()}
        for pod in pods:
            read, partner = {shard: holders[shard] for shard in shards[pod]}, self.partners.get(pod)
            asked = {holder for holding in read.values() for holder in holding} - {pod}
            if partner is not None:
                asked.add(partner)
            addresses = {other: self.addresses[other] for other in sorted(asked)}
            restore = self.restore and replace(self.restore, holders=read)
            yield pod, MemoryPlan(self.attempt_id, partner, copied.get(pod), addresses, restore, self.others)


_Holders = dict[CheckpointId, dict[int, list[int]]]  # pods by checkpoint and rank


def _holders(inventories: Mapping[int, Inventory]) -> _Holders:
    holders: _Holders = {}
    for pod, inventory in sorted(inventories.items()):
        for checkpoint, ranks in inventory.held:
            for rank in ranks:
                holders.setdefault(checkpoint, {}).setdefault(rank, []).append(pod)
    return holders


def _whole(holders: _Holders) -> list[CheckpointId]:
    full = [each for each, shards in holders.items() if len(shards) == each.world_size > 0]
    return [each for each in full if all(0 <= rank < each.world_size for rank in holders[each])]


def newest_whole(inventories: Mapping[int, Inventory], unreadable: Set[CheckpointId] = frozenset()) -> Restore | None:
    """The newest whole checkpoint: these pods together hold all its shards. None if there is none.

    One that could not be read is chosen only if there is no other.
    """
    holders = _holders(inventories)
    whole = [each for each in _whole(holders) if each not in unreadable]
    if not whole:
        restore = newest_whole(inventories) if unreadable else None
        return restore and replace(restore, doubtful=True)
    latest = {each.written_in: each for each in sorted(whole, key=lambda each: each.number)}  # of each attempt
    # Two attempts' checkpoints after the same step are of the same training: the one with more copies is safer.
    best = max(latest.values(), key=lambda each: (each.step, sum(map(len, holders[each].values())), each.written_in))
    return Restore(best, dict(sorted(holders[best].items())))


def partners(nodes: Mapping[int, str]) -> dict[int, int]:
    """The pod that holds copies of each pod's shards, given the pods' nodes: on another node where that is possible.

    Each pod holds the copies of one other pod. In the list of pods, sorted by node, a pod's partner comes as many
    places later as the largest node has pods: if no node has more than half of the pods, all partners are on two nodes.
    """
    if len(nodes) < 2:
        return {}
    sizes = Counter(nodes.values())
    order = sorted(nodes, key=lambda pod: (-sizes[nodes[pod]], nodes[pod], pod))
    shift = max(sizes.values())
    shift = 1 if shift == len(nodes) else shift
    return {pod: order[(index + shift) % len(order)] for index, pod in enumerate(order)}


def new_readers(restore: Restore, pods: Sequence[int], processes: int) -> list[int]:
    """The rank that reads each shard of the checkpoint to restore, and whose pod keeps the shard.

    ``pods`` take part, in the order of their ranks. A rank reads the shard that it wrote, also if its pod has to fetch
    the shard: then the list is empty. If the number of ranks has changed, the shards are spread over the pods that hold
    them.
    """
    if restore.checkpoint.world_size == len(pods) * processes:
        return []
    first = {pod: index * processes for index, pod in enumerate(pods)}  # rank of each pod
    load = dict.fromkeys(pods, 0)
    found = []
    for holders in restore.holders.values():
        pod = min([pod for pod in holders if pod in load] or load, key=lambda each: (load[each], each))
        found.append(first[pod] + load[pod] % processes)
        load[pod] += 1
    return found


class MemoryPlans:
    """What the leader makes the plans of its attempts from."""

    def __init__(self, processes: int, log: Callable[[str], None]) -> None:
        """``processes``: ranks of a pod."""
        self._processes, self._log = processes, log
        self._unreadable: set[CheckpointId] = set()  # an attempt could not read a shard of them

    def exclude(self, checkpoint: CheckpointId) -> None:
        """Do not restore this checkpoint again, as long as there is another one."""
        self._unreadable.add(checkpoint)

    def make(self, nodes: Mapping[int, str], inventories: Mapping[int, Inventory | None]) -> JobPlan | None:
        """Choose the checkpoint from which an attempt starts, and the partners in it, and log what is lost.

        ``nodes`` are the nodes of the pods that take part, in the order of their ranks. ``inventories`` may be of more
        pods: a pod that waits can give the shards that it holds. There is no plan if a pod that takes part keeps no
        checkpoints in memory.
        """
        known = {pod: inventory for pod, inventory in inventories.items() if inventory}
        without = [pod for pod in nodes if pod not in known]
        if without:
            if known:
                self._log(f"no checkpoints are kept in memory, because pod {min(without)} keeps none")
            return None
        holders = _holders(known)
        restore = newest_whole(known, self._unreadable)
        others = [each for each in _whole(holders) if restore and each != restore.checkpoint]
        self._log_loss(holders, restore, others)
        readers = new_readers(restore, list(nodes), self._processes) if restore else []
        addresses = {pod: (inventory.host, inventory.port) for pod, inventory in known.items()}
        return JobPlan(uuid.uuid4().hex, addresses, partners(nodes), readers, restore, others)

    def _log_loss(self, holders: _Holders, restore: Restore | None, others: Sequence[CheckpointId]) -> None:
        if restore:
            step, newest = restore.checkpoint.step, max((each.step for each in others), default=0)
            if newest > step:
                self._log(f"the checkpoint in memory after step {newest} could not be read: step {step} is restored")
        elif holders:
            cut = max(holders, key=lambda each: (each.step, each.number, each.written_in))
            lost = cut.world_size - len(holders[cut])
            self._log(
                f"the checkpoint in memory after step {cut.step} is incomplete: {lost} of its {cut.world_size} shards "
                "are lost"
            )
