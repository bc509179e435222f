"""The options of `Run.parallelize`: as its keyword arguments, and as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from flk_runtime.parallel.blocks import Blocks
from flk_runtime.parallel.initialize import Initializer
from flk_runtime.parallel.precision import Precision


class ParallelArgs(TypedDict, total=False):
    """The keyword arguments of `Run.parallelize`.

    - ``precision``: dtypes of the computation and of the reduction; the optimizer works in the model's own.
    - ``blocks``: modules that are sharded, recomputed and compiled one by one: classes, their names, paths such as
      ``["layers.*", "embed", "head"]``. Default: the modules of a repeated class in a ModuleList, ModuleDict or
      Sequential.
    - ``recompute``: drop the activations of blocks and compute them again in the backward pass.
    - ``compile``: compile each block with torch.compile; a string is the backend, a dictionary all its options.
    - ``shard_size``: number of ranks in a shard group under a hybrid strategy. Default: the ranks of one node.
    - ``find_unused_parameters``: ranks do not all use the same parameters in a forward pass. Under strategies that
      shard it needs torch 2.13, and a parameter that no rank has used gets a gradient of 0.
    - ``init``: for a model on the meta device, a function that is called with it once it is sharded, and sets the
      values of parameters and buffers; the path of weights, as of `load_weights`; or "reset_parameters", which says
      that the methods of this name of its modules set all values.
    """

    precision: Precision | None
    blocks: Blocks | None
    recompute: bool
    compile: bool | str | Mapping[str, Any]
    shard_size: int | None
    find_unused_parameters: bool
    init: Initializer | None


# The fields stand here once more: type checkers take keyword arguments from a TypedDict only, and that has no defaults.
@dataclass(frozen=True)
class ParallelOptions:
    """The options of `Run.parallelize` with their defaults."""

    precision: Precision | None = None
    blocks: Blocks | None = None
    recompute: bool = False
    compile: bool | str | Mapping[str, Any] = False
    shard_size: int | None = None
    find_unused_parameters: bool = False
    init: Initializer | None = None
