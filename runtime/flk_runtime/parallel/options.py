"""The options of `Run.parallelize`: as its keyword arguments, and as one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from torch import nn

from flk_runtime.parallel.blocks import Blocks
from flk_runtime.parallel.meta_init import Initializer
from flk_runtime.parallel.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Parallelizer = Callable[[nn.Module, "DeviceMesh"], object]


class ParallelArgs(TypedDict, total=False):
    """The keyword arguments of `Run.parallelize`.

    - ``precision``: dtypes of the computation and of the reduction; the optimizer works in the model's own.
    - ``blocks``: modules that are sharded, recomputed and compiled one by one: classes, their names, paths such as
      ``["layers.*", "embed", "head"]``, a function of path and module, or a minimum number of parameters. Default:
      the modules of a repeated class in a ModuleList, ModuleDict or Sequential.
    - ``recompute``: drop the activations of blocks and compute them again in the backward pass; or of the modules
      that are named as for ``blocks``, such as ``"Attention"``.
    - ``compile``: compile each block with torch.compile; a string is the backend, a dictionary all its options.
    - ``shard_size``: number of ranks in a shard group under a hybrid strategy. Default: the ranks of one node.
    - ``reshard_after_forward``: number of ranks over which a block's parameters stay sharded between its forward
      and backward passes, under full_shard and hybrid_shard; such as a node's. Default: the whole shard group.
    - ``prefetch``: number of blocks gathered before they are needed, under strategies that shard; many need memory.
      Default: one, as torch does it.
    - ``offload``: "cpu" keeps the shards of parameters, gradients and optimizer state in the memory of the CPU, where
      the optimizer steps, under strategies that shard.
    - ``find_unused_parameters``: ranks do not all use the same parameters in a forward pass.
    - ``init``: for a model on the meta device, a function that is called with it once it is sharded, and sets the
      values of parameters and buffers; the path of weights, as of `load_weights`; or "reset_parameters", which says
      that the methods of this name of its modules set all values.
    - ``mesh``: dimensions of the script's own parallelism and their sizes, such as ``{"tp": 2, "cp": 2}``. flk makes a
      DeviceMesh with these inside of the data's dimensions, over which FSDP2 shards. The ranks of one place in the
      data's dimensions get the same batches. ``cp`` counts as one of FSDP2's: its ranks have parts of the same
      sequences. Strategies that shard only; call parallelize before `loader`.
    - ``parallelize``: a function of the model and the DeviceMesh with the dimensions of ``mesh``, which splits the
      model in place, with DTensors: tensor, sequence, context or expert parallelism, by torch's or the model's code.
      With a dimension ``pp`` it leaves this rank's stage of a pipeline, or returns a list of its stages.
    - ``tp``: number of ranks over which linear layers and embeddings are split by ``tp_plan``, in place of ``mesh`` and
      ``parallelize``.
    - ``tp_plan``: styles by the paths of modules, such as ``{"layers.*.up": "colwise", "layers.*.down": "rowwise"}``.
      Default: the plan that a model of Hugging Face has.
    - ``save_frozen``: whether checkpoints have the parameters that require no gradient. With False, as for the base
      of LoRA, the script loads them before each start, and a checkpoint has only the hashes of their values.
    """

    precision: Precision | None
    blocks: Blocks | None
    recompute: bool | Blocks
    compile: bool | str | Mapping[str, Any]
    shard_size: int | None
    reshard_after_forward: int | None
    prefetch: int | None
    offload: str | None
    find_unused_parameters: bool
    init: Initializer | None
    mesh: Mapping[str, int] | None
    parallelize: Parallelizer | None
    tp: int | None
    tp_plan: Mapping[str, str] | None
    save_frozen: bool


# The fields stand here once more: type checkers take keyword arguments from a TypedDict only, and that has no defaults.
@dataclass(frozen=True)
class ParallelOptions:
    """The options of `Run.parallelize` with their defaults."""

    precision: Precision | None = None
    blocks: Blocks | None = None
    recompute: bool | Blocks = False
    compile: bool | str | Mapping[str, Any] = False
    shard_size: int | None = None
    reshard_after_forward: int | None = None
    prefetch: int | None = None
    offload: str | None = None
    find_unused_parameters: bool = False
    init: Initializer | None = None
    mesh: Mapping[str, int] | None = None
    parallelize: Parallelizer | None = None
    tp: int | None = None
    tp_plan: Mapping[str, str] | None = None
    save_frozen: bool = True

    @classmethod
    def of(cls, arguments: ParallelArgs) -> ParallelOptions:
        """The options that these arguments are. Raises TypeError if one is unknown, with the names that there are."""
        names = ParallelArgs.__annotations__
        if unknown := [name for name in arguments if name not in names]:
            raise TypeError(f"parallelize() has no argument {unknown[0]!r}: expected one of {', '.join(names)}")
        return cls(**arguments)
