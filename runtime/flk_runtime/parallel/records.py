"""FSDP2's records of sharded parameters, and the gradients of full parameters that it has not reduced yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

GRAD: Final[Any] = torch.Tensor.grad
"""The attribute of torch, also while `flk_runtime.parallel.between_passes` has another one in its place."""

_gradient: Final = GRAD.__get__


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """FSDP2's records of the parameters of ``model``, each with the shard and, once it was gathered, the full one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module._get_fsdp_state()):
                yield from group.fsdp_params


def groups_of(state: Any) -> list[Any]:
    """FSDP2's groups of the parameters of a unit with ``state``. Older releases of torch have at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def stand_ins(record: Any) -> list[Any]:
    """What FSDP2 has registered in the place of a shard: the full parameter, and one that fewer ranks share."""
    found = (getattr(record, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
    return [each for each in found if each is not None]


def is_unreduced(record: Any) -> bool:
    """Whether a parameter has a gradient that is not reduced yet."""
    return any_unreduced((record,))


def any_unreduced(records: Iterable[Any]) -> bool:
    """Whether one of several parameters has such a gradient: `is_unreduced` without a call for each."""
    for record in records:
        if record.unsharded_accumulated_grad is not None:
            return True
        full = getattr(record, "_unsharded_param", None)
        if full is not None and _gradient(full) is not None:
            return True
    return False


def drop_unreduced(record: Any) -> None:
    """Drop a gradient that is not reduced yet."""
    record.unsharded_accumulated_grad = None
    if hasattr(record, "_unsharded_param"):
        GRAD.__set__(record._unsharded_param, None)
