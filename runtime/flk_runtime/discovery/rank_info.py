"""RankInfo: the rank of this process, the size of its job, and the address where the ranks connect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """The identity of one process of a job.

    ``rank`` is in [0, world_size), ``local_rank`` in [0, local_world_size), ``node_rank`` in [0, nodes).
    ``local_world_size`` is this node's; nodes may differ where the launcher describes each of them (Slurm, torchrun).
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    launcher: str = "alone"  # flk, torchrun, horovod, slurm, openmpi, mpich, pytorchjob, trainer, env, alone
    # Host and port of the store. None if world_size is 1, and where only the launcher's communicator can tell it.
    master: tuple[str, int] | None = None
    attempt: int = 0  # number of earlier starts of this job's ranks
    nodes: int = 1
    full_world_size: int = 0  # of an elastic job when all its pods are there; 0: the launcher does not tell
    agent_store: bool = False  # the launcher hosts the store at ``master``, so rank 0 does not

    @property
    def even(self) -> bool:
        """Whether all nodes have as many ranks as this one."""
        return self.world_size == self.nodes * self.local_world_size

    @property
    def two_levels(self) -> bool:
        """Whether there are several nodes with several ranks each, all with the same number of them."""
        return self.even and self.nodes > 1 and self.local_world_size > 1
