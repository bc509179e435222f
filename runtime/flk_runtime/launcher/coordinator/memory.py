"""Checkpoints in memory, as the leader knows them: from which one an attempt starts, and which shards must not be lost.

`MemoryPlans` chooses the checkpoint and the partners of an attempt. `Drain` has launchers that have to stop
transfer the shards that would be lost with them: a launcher does not end while it holds a shard that the next attempt
restores and that no pod that stays holds. The leader names a pod that takes these shards, and then releases the
launcher.

This module decides. `leader` sends the messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flk_runtime.launcher.replication import Inventory
from flk_runtime.launcher.replication.plan import Copy, MemoryPlan, ShardId, make_plan, newest_whole
from flk_runtime.launcher.transport.messages import Join, Release, Transfer

_LEADER = 0  # the pod whose launcher leads


@dataclass
class _DrainingPod:
    """A launcher that has to stop."""

    inventory: Inventory
    target: int | None = None  # the pod to which it transfers shards now
    tried: set[int] = field(default_factory=set)  # pods to which it has transferred shards, or could not
    released: bool = False  # it may end


class Drain:
    """The launchers that have to stop and are still connected."""

    def __init__(self) -> None:
        self._pods: dict[int, _DrainingPod] = {}

    def add(self, pod: int, inventory: Inventory) -> None:
        """Note that the launcher of a pod has to stop, and the inventory of its memory."""
        self._pods[pod] = _DrainingPod(inventory)

    def remove(self, pod: int) -> None:
        """Note that the launcher of a pod has disconnected."""
        self._pods.pop(pod, None)

    @property
    def pods(self) -> set[int]:
        """The pods whose launchers have to stop and are still connected."""
        return set(self._pods)

    @property
    def unfinished(self) -> bool:
        """Whether a launcher that has to stop may not end yet."""
        return not all(draining.released for draining in self._pods.values())

    def transferred(self, pod: int) -> None:
        """Note that the launcher of a pod has transferred its shards, or could not."""
        draining = self._pods.get(pod)
        if draining and draining.target is not None:
            draining.tried.add(draining.target)
            draining.target = None

    def decide(self, staying: Mapping[int, Inventory | None]) -> list[tuple[int, Transfer | Release]]:
        """Decide what the launchers that have to stop do next, given the memory of the pods that stay.

        Returns messages with their receivers. Of several launchers that hold a shard, the first transfers it. The
        shards are spread over the pods that stay. The leader's own launcher is released last.
        """
        messages: list[tuple[int, Transfer | Release]] = []
        needed = self._needed(staying)
        for pod, draining in sorted(self._pods.items(), key=lambda item: item[0] == _LEADER):
            if draining.released or draining.target is not None:
                continue
            target = self._target(draining, staying) if pod in needed else None
            inventory = None if target is None else staying[target]
            if target is not None and inventory:
                draining.target = target
                messages.append((pod, Transfer(target, inventory.host, inventory.port, needed[pod])))
            elif pod != _LEADER or all(other.released for each, other in self._pods.items() if each != pod):
                draining.released = True
                messages.append((pod, Release()))
        return messages

    def _needed(self, staying: Mapping[int, Inventory | None]) -> dict[int, list[ShardId]]:
        """The shards that each launcher has to transfer so that the newest whole checkpoint is not lost."""
        leaving = {pod: draining.inventory for pod, draining in self._pods.items()}
        restore = newest_whole({pod: each for pod, each in {**staying, **leaving}.items() if each})
        needed: dict[int, list[ShardId]] = {}
        for rank, pods in restore.holders.items() if restore else ():
            if restore and all(pod in leaving for pod in pods):
                needed.setdefault(pods[0], []).append(ShardId(restore.checkpoint, rank))
        return needed

    def _target(self, draining: _DrainingPod, staying: Mapping[int, Inventory | None]) -> int | None:
        """The pod that takes the shards of a launcher: one to which the fewest others transfer; None: there is none."""
        used = [other.target for other in self._pods.values()]
        able = [pod for pod, inventory in staying.items() if inventory and pod not in draining.tried]
        return min(able, key=lambda pod: (used.count(pod), pod), default=None)


def with_shards(inventory: Inventory, shards: Sequence[ShardId]) -> Inventory:
    """The inventory of a pod that holds these shards too."""
    return Inventory.of(inventory.host, inventory.port, {*inventory.shards, *shards})


class MemoryPlans:
    """The plans of attempts for checkpoints in memory."""

    def __init__(self, processes: int, log: Callable[[str], None]) -> None:
        """``processes``: ranks of a pod."""
        self._processes, self._log = processes, log
        self._unreadable: set[Copy] = set()  # copies of shards that an attempt could not read
        self.exist = False
        """Whether the latest attempt keeps checkpoints in memory."""

    def exclude(self, copies: Iterable[Copy]) -> None:
        """Do not read these copies again, as long as their pods have them."""
        self._unreadable |= set(copies)

    def make(
        self, pods: Sequence[int], joined: Mapping[int, Join]
    ) -> tuple[Iterator[tuple[int, MemoryPlan]], list[int]]:
        """Choose the checkpoint from which the attempt of ``pods`` starts, and the partners in it.

        Returns each pod with its part, and the rank that reads each shard; none: the one that wrote it. ``joined`` are
        the members that are ready, spares included.
        """
        inventories = {pod: join.memory for pod, join in joined.items()}
        held = {pod: set(inventory.shards) for pod, _ in self._unreadable if (inventory := inventories.get(pod))}
        self._unreadable = {(pod, shard) for pod, shard in self._unreadable if shard in held.get(pod, ())}
        nodes = {pod: joined[pod].node for pod in pods}
        plan, loss = make_plan(uuid.uuid4().hex, inventories, nodes, self._unreadable)
        if loss:
            self._log(loss)
        self.exist = plan is not None
        if plan is None:
            return iter(()), []
        ranks = {pod: range(index * self._processes, (index + 1) * self._processes) for index, pod in enumerate(pods)}
        readers = plan.readers(ranks)
        return plan.slices(ranks, readers), readers
