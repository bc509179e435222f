"""rebind_optimizer: gives an optimizer the sharded parameters in place of those that it was made with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import OptimizerState, load_as_saved
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.parallel.model import ParallelModel


def rebind_optimizer(
    optimizer: Optimizer, model: nn.Module, parallelize: Callable[[], ParallelModel], *, strict: bool
) -> ParallelModel:
    """Call ``parallelize``, which shards ``model``, and give ``optimizer`` the parameters of the result. Collective.

    Meanwhile the optimizer holds no parameters, so that nothing keeps full parameters alive that have been sharded. Its
    groups keep their order and hyperparameters, and state that it has is sharded as the parameters are.

    Raises SetupError if ``strict`` and the optimizer holds parameters that are not the model's (before ``parallelize``
    is called), or if its state cannot be sharded.
    """
    groups = _parameter_names(optimizer, model, strict=strict)
    state = optimizer.state_dict() if optimizer.state else None
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    parallel = parallelize()
    parameters = parallel.parameters()
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[each] if isinstance(each, str) else each for each in names]
    parallel.attach(optimizer)
    if state is None:
        return parallel
    try:
        _shard(optimizer, parallel, state)
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise SetupError(
            f"cannot shard the optimizer's state: {error}; create the optimizer anew, or call parallelize before its "
            "first step"
        ) from error
    return parallel


def _shard(optimizer: Optimizer, parallel: ParallelModel, state: dict[str, Any]) -> None:
    """Load ``state``, which is of full tensors, as `torch.optim.Optimizer.load_state_dict` takes it."""
    parameters = list(OptimizerState(optimizer, {"model": parallel.module}).names())

    def shard(parameter: nn.Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: parallel.local_shard(parameter, value)
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
            else value
            for key, value in values.items()
        }

    # An entry that belongs to no parameter has a key of the optimizer's own, and any value.
    entries = {
        index: shard(parameters[index], values) if isinstance(index, int) else values
        for index, values in state["state"].items()
    }
    load_as_saved(optimizer, {**state, "state": entries}, parameters)


def _parameter_names(optimizer: Optimizer, model: nn.Module, *, strict: bool) -> list[list[str | nn.Parameter]]:
    """The parameters of each group of the optimizer: by name, or the parameter itself if it is not the model's."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    groups: list[list[str | nn.Parameter]] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if strict and id(parameter) not in names:
                raise SetupError(
                    f"group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not "
                    "in the model, so its gradient would differ between ranks: put all trained parameters into one "
                    "module"
                )
        groups.append([names.get(id(parameter), parameter) for parameter in group["params"]])
    return groups
