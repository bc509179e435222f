"""Parallel training of one model: DDP and FSDP2 behind one interface.

The words of this package:

- A *block* is a module that is sharded, recomputed and compiled as a unit, such as a layer; a *unit* is what FSDP2
  gathers and reduces at once: a block, an end of the model, or a module that computes in float32.
- *Shards* are the parts of a parameter that ranks of a *shard group* hold; *replicas* are ranks that hold the same.
- *Loose buffers* are those that no one sends to the ranks, and *tied* ones those that rank 0 sends.

`parallelize` applies a strategy to a model and its optimizer and returns a `ParallelModel`, which
`flk_runtime.training` trains and checkpoints. The package imports checkpoint (for the protocol of saved state) and
distributed; only `training` imports it. ddp and fsdp2 are imported inside functions, when a strategy needs them, as
the torch modules behind them take long to import.
"""

from flk_runtime.parallel.blocks import Blocks, find_blocks
from flk_runtime.parallel.model import ParallelModel
from flk_runtime.parallel.options import ParallelArgs, ParallelOptions
from flk_runtime.parallel.precision import Precision
from flk_runtime.parallel.rebind import adopt_optimizer
from flk_runtime.parallel.strategies import STRATEGIES, parallelize

__all__ = [
    "STRATEGIES",
    "Blocks",
    "ParallelArgs",
    "ParallelModel",
    "ParallelOptions",
    "Precision",
    "adopt_optimizer",
    "find_blocks",
    "parallelize",
]
