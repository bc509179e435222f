"""MemoryPlans: what the leader knows of checkpoints in memory, from which it plans each attempt."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from flk_runtime.launcher.replication.plan import Copy, MemoryPlan, make_plan
from flk_runtime.launcher.transport.messages import Join


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
