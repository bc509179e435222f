"""refuse_silent_errors(): what DTensor does wrongly with sharded parameters is made right, or is an error."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._ops import _math_ops

from flk_runtime.distributed import is_settled
from flk_runtime.errors import SetupError
from flk_runtime.parallel.between_passes import BETWEEN_PASSES
from flk_runtime.parallel.full_parameters import complete_passes, explain
from flk_runtime.parallel.lost_changes import LostChanges

LOST: Final = LostChanges()
"""Of the sharded tensors of this process."""

_ATEN: Final = torch.ops.aten
_RANDOM: Final = (
    _ATEN.normal_.default,
    _ATEN.uniform_.default,
    _ATEN.bernoulli_.float,
    _ATEN.rand_like.default,
    _ATEN.randn_like.default,
)
_OF_SHARDS: Final = (
    "sharded parameters gives no gradients: call backward(), which gives them in parameter.grad, or use strategy ddp "
    "without precision="
)
_WAYS: Final = (
    "on all ranks, call run.save(), or run.export(FILE) for weights, or save what get_model_state_dict and "
    "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict return with "
    "StateDictOptions(full_state_dict=True)"
)
_REDUCE: Final[Any] = DTensor.__reduce_ex__
_saves: Final = ContextVar("saves", default=False)
"""Whether torch.save runs: copies, and what travels to other processes, are pickled too, and may have shards."""


def refuse_module_saves(kind: Any) -> None:
    """Have torch.save of modules of ``kind``, a class of FSDP2, raise SetupError."""

    def reduce_module(module: Any, protocol: Any) -> Any:
        if _saves.get():
            raise SetupError(
                f"torch.save cannot pickle {type(module).__name__.removeprefix('FSDP')}, a module of FSDP2: {_WAYS}"
            )
        return super(kind, module).__reduce_ex__(protocol)  # a module may be of a class that inherits this

    kind.__reduce_ex__ = reduce_module


def _reduce_tensor(tensor: Any, protocol: Any) -> Any:
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    if _saves.get() and any(size > 1 and not each.is_replicate() for size, each in sizes):
        raise SetupError(
            f"torch.save would write this rank's shards of a sharded tensor alone: {_WAYS}; for a file of each rank's "
            "own, pass tensor.to_local()"
        )
    return _REDUCE(tensor, protocol)


def _marked(write: Any) -> Any:
    """``write`` of torch.serialization, which torch.save calls, that says that it runs."""

    @functools.wraps(write)
    def marked(*args: Any, **kwargs: Any) -> Any:
        token = _saves.set(True)
        try:
            return write(*args, **kwargs)
        finally:
            _saves.reset(token)

    return marked


@functools.cache
def refuse_silent_errors() -> None:
    """From now on, raise SetupError where DTensor would ignore a change or give a value of this rank alone.

    Random numbers on CPUs, and whether any element is true, are made right.
    """
    autograd: Any = torch.autograd
    engine: Any = autograd._engine_run_backward

    @functools.wraps(engine)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        inputs = args[4] if len(args) > 4 else ()  # none: all leaves
        shards = [place for place, each in enumerate(inputs) if isinstance(each, DTensor) and is_settled(each)]
        if shards and kwargs.get("accumulate_grad"):
            raise SetupError(f"backward(inputs=) with {_OF_SHARDS}")
        BETWEEN_PASSES.end()
        try:
            found = engine(*args, **kwargs)
        except RuntimeError as error:
            if shards and "not have been used in the graph" in str(error):
                raise SetupError(f"torch.autograd.grad of {_OF_SHARDS}") from error
            raise explain(error) or error from error.__cause__
        if torch._C._current_graph_task_id() == -1:  # not inside of another backward pass
            complete_passes()
        if any(found[place] is None for place in shards):
            raise SetupError(f"torch.autograd.grad of {_OF_SHARDS}")
        return found

    autograd._engine_run_backward = run_backward  # of torch.autograd.grad and of Tensor.backward
    redistribute: Any = DTensor.redistribute

    @functools.wraps(redistribute)
    def redistribute_at_once(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        # A compiled block would give no gradient to a result that is not there yet, as of an embedding that is split.
        return redistribute(*args, **kwargs)

    DTensor.redistribute = redistribute_at_once  # type: ignore[method-assign]
    DTensor.__reduce_ex__ = _reduce_tensor  # type: ignore[method-assign]
    serialization: Any = torch.serialization
    serialization._save, serialization._legacy_save = map(_marked, (serialization._save, serialization._legacy_save))
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[_ATEN._local_scalar_dense.default] = _read
    if hasattr(dispatcher, "_dispatch_get_local_results_slow_path"):  # not in older releases of torch
        _watch_copies(dispatcher)
    if not torch.cuda.is_available():  # else torch has a generator for all shards
        dispatcher._custom_op_handlers.update(dict.fromkeys(_RANDOM, _draw))
    # The ranks would add up whether they have found one, and the sum is not 1 once it is no bool.
    for each in filter(_is_any, list(_math_ops.LINEAR_REDUCTION_OP_MAP)):
        _math_ops.LINEAR_REDUCTION_OP_MAP[each] = "max"


@functools.cache
def gather_for_weights() -> None:
    """From now on, have a zero-bubble schedule of a pipeline find the full parameters of a sharded stage.

    It computes the gradients of inputs and of weights apart, and takes the weights from the module, where a unit that
    has been freed after its forward pass has shards, which are in no graph: they would get no gradient.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining import stage as stages

    kind: Any = stages._PipelineStageBase
    backward = kind.backward_maybe_with_nosync

    @functools.wraps(backward)
    def gathered(stage: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        for unit in stage.submod.modules() if backward_type != "full" else ():
            if isinstance(unit, FSDPModule):
                unit.unshard()
        return backward(stage, backward_type, *args, **kwargs)

    kind.backward_maybe_with_nosync = _paused(gathered)
    if hasattr(kind, "perform_reduce_grad"):  # not in older releases of torch
        kind.perform_reduce_grad = _paused(kind.perform_reduce_grad)


def _paused(method: Any) -> Any:
    """``method`` of a stage, which sets gradients of full parameters itself."""

    @functools.wraps(method)
    def paused(*args: Any, **kwargs: Any) -> Any:
        with BETWEEN_PASSES.paused():
            return method(*args, **kwargs)

    return paused


def _is_any(operation: Any) -> bool:
    return bool(operation._schema.name == "aten::any")


def _draw(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> DTensor:
    """Draw random numbers for a whole DTensor, and keep the shard. Each rank would draw the same for its own shard."""
    tensor, *others = arguments
    whole = operation(torch.empty(tensor.shape, dtype=tensor.dtype), *others, **options)
    replicated = DTensor.from_local(whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim, run_check=False)
    drawn = replicated.redistribute(placements=tensor.placements)
    if not operation._schema.is_mutable:
        return drawn
    tensor._local_tensor.copy_(drawn._local_tensor)
    return cast("DTensor", tensor)


def _watch_copies(dispatcher: Any) -> None:
    """Have LOST know the copies that operations of DTensor make where one process would have views."""
    compute = dispatcher._dispatch_get_local_results_slow_path

    @functools.wraps(compute)
    def compute_local(operation: Any, arguments: Any, info: Any) -> Any:
        result = compute(operation, arguments, info)
        if _is_view(operation) and info.output_sharding.needs_redistribute and info.compute_mesh.size() > 1:
            LOST.add(result, arguments[0])
        return result

    dispatcher._dispatch_get_local_results_slow_path = compute_local


@functools.cache
def _is_view(operation: Any) -> bool:
    """Whether the result of an operation of torch is a view, which changes in place along with the argument."""
    infos = [each.alias_info for each in operation._schema.returns]
    return any(each is not None and not each.is_write for each in infos)


def _read(operation: Any, arguments: tuple[Any, ...], _: Any) -> Any:
    """The value of a DTensor with one element, such as a norm, as ``item()`` and ``float()`` read it."""
    (tensor,) = arguments
    if tensor.device_mesh.size() > 1 and any(each.is_partial() for each in tensor.placements):
        raise SetupError(
            "item() of a value that was computed of sharded tensors, such as a norm, would give a value of this rank's "
            "shards alone: call full_tensor().item() on all ranks"
        )
    return operation(tensor._local_tensor)
