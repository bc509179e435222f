"""Checkpoints in memory: the launcher holds the shards of its pod's ranks, and replicas of another pod's shards.

A rank writes its shard of a checkpoint into a file in memory that its launcher names (`store`), and tells the launcher
when the shard is whole (`flk_runtime.shared.memory_messages`). The launcher replicates the shard: it sends a copy to
the launcher of its partner (`exchange`), over a connection of its own. Then the launcher answers the rank.
At their next save the ranks tell each other whether all have such an answer. If so, the checkpoint is whole, and the
files of the checkpoint before it are used again. When an attempt starts, the leader chooses the newest whole checkpoint
among the shards that the members hold (`plan`), and each launcher fetches the shards that its ranks ask for.
`service` bounds the memory and connects these modules.

`launcher.agent` uses `service`, and `launcher.coordinator` uses `plan`. The package imports the settings of the
launcher, `flk_runtime.wire`, and the format of shards, `flk_runtime.shared.shard_file`; never torch.
"""

from flk_runtime.launcher.replication.plan import Inventory, MemoryPlan

__all__ = ["Inventory", "MemoryPlan"]
