"""Checkpoints: each rank copies its shard of the state into memory, and a thread writes it while training goes on.

`CheckpointManager` knows the content of a checkpoint and when it is restored. `save` makes a checkpoint, `storage`
keeps it, `load` reads it, and `gather` does so from the memory of the pods. `Stateful` and `DistributedStateful` are
the protocols of objects that can be saved. `flk_runtime.training` and `flk_runtime.parallel` import this package. It
imports torch, the loaders and the process group, and no module that parallelizes a model. Modules that need
torch.distributed.checkpoint, which takes long to import, are imported when a run has checkpoints.
"""

from flk_runtime.checkpoint.adapters.adapt import module_state, optimizer_state
from flk_runtime.checkpoint.adapters.module import ModuleState
from flk_runtime.checkpoint.adapters.optimizer import OptimizerState, has_own_state_dict, load_as_saved, trained_modules
from flk_runtime.checkpoint.adapters.placed import placed
from flk_runtime.checkpoint.adapters.wrappers import (
    Parts,
    is_sharded,
    local,
    names_by_id,
    parameters_of,
    reshard,
    roots_of,
    user_name,
)
from flk_runtime.checkpoint.manager import INTERNAL, CheckpointManager, CheckpointOptions
from flk_runtime.checkpoint.opening import open_checkpoints
from flk_runtime.checkpoint.state import Chunk, SplitState, chunks_of
from flk_runtime.checkpoint.stateful import Declared, DistributedStateful, Stateful, Values, inside_of, with_state

__all__ = [
    "INTERNAL",
    "CheckpointManager",
    "CheckpointOptions",
    "Chunk",
    "Declared",
    "DistributedStateful",
    "ModuleState",
    "OptimizerState",
    "Parts",
    "SplitState",
    "Stateful",
    "Values",
    "chunks_of",
    "has_own_state_dict",
    "inside_of",
    "is_sharded",
    "load_as_saved",
    "local",
    "module_state",
    "names_by_id",
    "open_checkpoints",
    "optimizer_state",
    "parameters_of",
    "placed",
    "reshard",
    "roots_of",
    "trained_modules",
    "user_name",
    "with_state",
]
