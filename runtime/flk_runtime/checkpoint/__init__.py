"""Checkpoints: each rank copies its share of the state into memory, and a thread writes it while training goes on.

`CheckpointManager` knows what is in a checkpoint and when it is restored, `save` makes one, `storage` is where it is,
`load` and `shard` read. `Stateful` and `DistributedStateful` are the protocols of what can be saved. `flk_runtime.run`
and `flk_runtime.parallel` import this package. It imports torch, the loaders and the process group, and nothing of how
a model is parallelized. What needs torch.distributed.checkpoint, which takes long to import, is imported when a run has
checkpoints.
"""

from flk_runtime.checkpoint.adapters import (
    ModuleState,
    OptimizerState,
    load_as_saved,
    parameters_of,
    reshard,
    trained_modules,
)
from flk_runtime.checkpoint.manager import CheckpointManager, CheckpointOptions
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful

__all__ = [
    "CheckpointManager",
    "CheckpointOptions",
    "DistributedStateful",
    "ModuleState",
    "OptimizerState",
    "Stateful",
    "load_as_saved",
    "parameters_of",
    "reshard",
    "trained_modules",
]
