"""Data: loaders that give each rank its share of every step, and shards of sequences.

The words of this package:

- A *step* of a loader is what all ranks take together for one step of the optimizer; a rank's part of it is its
  *share*, which may consist of several *micro-batches*.
- A *position* is the number of samples of an epoch that all ranks together were given: it means the same at any number
  of ranks.
- An *iteration* is one ``iter(loader)``. The one that gave the batch of the latest step *trains*, and any other is a
  *look*.
- A *shard* is a piece of a stream that can be read alone; a *part* is the shards that one process, a *lane*, reads.

`training` imports this package, and `flk_runtime` exports `Loader` and `shard` from it. It needs torch; loaders of
map-style datasets and `shard` work without a process group.
"""

from flk_runtime.data.evaluation import EvaluationLoader
from flk_runtime.data.factory import is_stream, make_loader, share_of_worker
from flk_runtime.data.fingerprint import describe_data, length_of
from flk_runtime.data.iterable import IterableLoader
from flk_runtime.data.loader import EpochLoader, LoaderContext, LoaderEvents, LoaderOptions
from flk_runtime.data.map_style import Loader
from flk_runtime.data.micro_batches import MicroBatches, StepShare, parts_of
from flk_runtime.data.partition import shard
from flk_runtime.data.reader import count_shards, sources_of
from flk_runtime.data.samplers import compare as compare_orders

__all__ = [
    "EpochLoader",
    "EvaluationLoader",
    "IterableLoader",
    "Loader",
    "LoaderContext",
    "LoaderEvents",
    "LoaderOptions",
    "MicroBatches",
    "StepShare",
    "compare_orders",
    "count_shards",
    "describe_data",
    "is_stream",
    "length_of",
    "make_loader",
    "parts_of",
    "shard",
    "share_of_worker",
    "sources_of",
]
