"""The optimizer of a parallelized model: how it changes to the sharded parameters, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import DistributedStateful, fetch
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.parallel.model import ParallelModel


class OptimizerState(DistributedStateful):
    """The state of an optimizer of a parallelized model: ``torch.optim.Optimizer.state_dict`` with full tensors."""

    def __init__(self, optimizer: Optimizer, parallel: ParallelModel) -> None:
        self._optimizer, self._parallel = optimizer, parallel

    def state_dict(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        parameters = self._parameters()
        entries = self._parallel.complete_optimizer_state(state["state"], parameters)
        state["state"] = {
            index: {key: self._parallel.full_tensor(parameters[index], value) for key, value in entries[index].items()}
            for index in sorted(entries)
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parameters = self._parameters()
        entries: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            if not 0 <= index < len(parameters):
                raise ValueError(f"unexpected state of parameter {index}: the optimizer has {len(parameters)}")
            entries[index] = {}
            for key, value in values.items():
                value = fetch(value)
                shape = self._parallel.full_shape(parameters[index])
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                    value = self._parallel.local_shard(parameters[index], value)
                entries[index][key] = value
        self._optimizer.load_state_dict({**state, "state": entries})

    def reload_hyperparameters(self, state: Mapping[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


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
        OptimizerState(optimizer, parallel).load_state_dict(state)
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise SetupError(
            f"cannot shard the optimizer's state: {error}; create the optimizer anew, or call parallelize before its "
            "first step"
        ) from error
    return parallel


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
