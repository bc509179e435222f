"""Checkpoints: the state of a training run in one file per checkpoint, written by rank 0 and broadcast on resume.

`CheckpointManager` knows what is in a checkpoint and when it is restored, `CheckpointFolder` reads and writes the
files, `broadcast_newest` sends the newest one from rank 0 to all ranks, and `Stateful` and `DistributedStateful` are
the protocols of what can be saved. `flk_runtime.run`, `flk_runtime.initialize` and `flk_runtime.parallel` import this
package; it imports torch, the loaders and the process group, and nothing of how a model is parallelized.
"""

from flk_runtime.checkpoint.broadcast import LazyBroadcastTensor, broadcast_newest, fetch
from flk_runtime.checkpoint.manager import CheckpointManager
from flk_runtime.checkpoint.stateful import DistributedStateful, Stateful
from flk_runtime.checkpoint.storage import CheckpointFolder

__all__ = [
    "CheckpointFolder",
    "CheckpointManager",
    "DistributedStateful",
    "LazyBroadcastTensor",
    "Stateful",
    "broadcast_newest",
    "fetch",
]
