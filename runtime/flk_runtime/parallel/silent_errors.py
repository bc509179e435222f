"""refuse_silent_errors(): what DTensor does wrongly with sharded parameters is an error that names it."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from flk_runtime.distributed import is_settled
from flk_runtime.errors import SetupError

_OF_SHARDS: Final = (
    "sharded parameters gives no gradients: call backward(), which gives them in parameter.grad, or use strategy ddp "
    "without precision="
)


@functools.cache
def refuse_silent_errors() -> None:
    """From now on, raise SetupError where DTensor would ignore a change or give a value of this rank alone."""
    plain: Any = torch.Tensor.data

    def assign(tensor: DTensor, value: torch.Tensor) -> None:
        if is_settled(tensor):
            raise SetupError(
                "an assignment to .data of a sharded parameter would be lost: change it in place, as in "
                "parameter.data.copy_(values)"
            )
        plain.__set__(tensor, value)

    DTensor.data = property(plain.__get__, assign)  # type: ignore[assignment]
    autograd: Any = torch.autograd
    engine: Any = autograd._engine_run_backward

    @functools.wraps(engine)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        inputs = args[4] if len(args) > 4 else ()  # none: all leaves
        shards = [place for place, each in enumerate(inputs) if isinstance(each, DTensor) and is_settled(each)]
        if shards and kwargs.get("accumulate_grad"):
            raise SetupError(f"backward(inputs=) with {_OF_SHARDS}")
        try:
            found = engine(*args, **kwargs)
        except RuntimeError as error:
            if shards and "not have been used in the graph" in str(error):
                raise SetupError(f"torch.autograd.grad of {_OF_SHARDS}") from error
            raise
        if any(found[place] is None for place in shards):
            raise SetupError(f"torch.autograd.grad of {_OF_SHARDS}")
        return found

    autograd._engine_run_backward = run_backward  # of torch.autograd.grad and of Tensor.backward
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read


def _read(operation: Any, arguments: tuple[Any, ...], _: Any) -> Any:
    """The value of a DTensor with one element, such as a norm, as ``item()`` and ``float()`` read it."""
    (tensor,) = arguments
    if tensor.device_mesh.size() > 1 and any(each.is_partial() for each in tensor.placements):
        raise SetupError(
            "item() of a value that was computed of sharded tensors, such as a norm, would give a value of this rank's "
            "shards alone: call full_tensor().item() on all ranks"
        )
    return operation(tensor._local_tensor)
