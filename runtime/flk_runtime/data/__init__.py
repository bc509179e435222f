"""Data: loaders that give each rank its share of every step and shards of sequences.

`run` imports this package, and `flk_runtime` exports `Loader` and `shard` from it. It needs torch; loaders of map-style
datasets and `shard` work without a process group.
"""

from flk_runtime.data.evaluation import EvaluationLoader
from flk_runtime.data.factory import length_of, make_loader, share_of_worker
from flk_runtime.data.fingerprint import describe_data
from flk_runtime.data.iterable import IterableLoader
from flk_runtime.data.loader import EpochLoader, LoaderContext, LoaderEvents, LoaderOptions
from flk_runtime.data.map_style import Loader
from flk_runtime.data.micro_batches import MicroBatches, StepShare, parts_of
from flk_runtime.data.partition import DataShard, shard
from flk_runtime.data.parts import count_shards
from flk_runtime.data.samplers import compare as compare_orders

__all__ = [
    "DataShard",
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
    "length_of",
    "make_loader",
    "parts_of",
    "shard",
    "share_of_worker",
]
