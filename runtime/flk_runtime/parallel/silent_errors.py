"""refuse_silent_errors(): what DTensor does wrongly with sharded parameters is an error that names it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flk_runtime.distributed import is_settled
from flk_runtime.errors import SetupError


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
