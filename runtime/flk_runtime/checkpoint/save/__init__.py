"""Saving: the plan of each rank's chunks, the copy in memory that stops the training, and the write in the background.

`Saver` does it all, with `plan`, `staging` and `writer` as its steps. Only `flk_runtime.checkpoint` imports this
package, when a run has checkpoints, since it imports torch.distributed.checkpoint.
"""

from flk_runtime.checkpoint.save.saver import Saver

__all__ = ["Saver"]
