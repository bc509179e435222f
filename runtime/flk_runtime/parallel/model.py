"""A model in the form that trains with all ranks, and what a run asks of it. Each kind of sharding is a subclass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import storage as snapshot
from flk_runtime.checkpoint.stateful import DistributedStateful
from flk_runtime.errors import CheckpointError, SetupError


class ParallelModel(DistributedStateful):
    """The model as it is, whole on every rank: what a world of one and the strategy ``none`` train."""

    def __init__(self, model: nn.Module, called: nn.Module | None = None) -> None:
        self.model = model  # the user's
        self.called = called or model  # what the user calls instead

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes in here add to the gradients without communicating."""
        return contextlib.nullcontext()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``; the norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type, error_if_nonfinite)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer gets, by the user's names: a tied parameter has several."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def attach(self, optimizer: Optimizer) -> None:
        """``optimizer`` has this model's parameters from now on."""

    # Snapshots: whole tensors, whatever this rank holds

    def state_dict(self) -> dict[str, Any]:
        """The model's state, whole and by the user's names, on rank 0; elsewhere it is not used. Collective."""
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` returned. Collective: ``state`` as `snapshot.agree` gives it to each rank."""
        self.model.load_state_dict(snapshot.fetch(state))

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def whole(self, parameter: nn.Parameter, part: Any) -> Any:
        """The whole of a value of the optimizer's state for ``parameter``, on rank 0. Collective."""
        return part

    def part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of ``whole``, which has the shape of the whole parameter."""
        return whole

    def agree(self, state: dict[int, dict[str, Any]], parameters: list[nn.Parameter]) -> dict[int, dict[str, Any]]:
        """The optimizer's state with an entry wherever another rank has one: `whole` is collective. Collective."""
        return state


class OptimizerState(DistributedStateful):
    """The state of an optimizer of a wrapped model, for snapshots: in torch's own format, with whole tensors."""

    def __init__(self, optimizer: Optimizer, wrapped: ParallelModel) -> None:
        self._optimizer, self._wrapped = optimizer, wrapped

    def state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0; elsewhere it is not used. Collective."""
        state = self._optimizer.state_dict()
        parameters = self._parameters()
        entries = self._wrapped.agree(state["state"], parameters)
        state["state"] = {
            index: {key: self._wrapped.whole(parameters[index], value) for key, value in entries[index].items()}
            for index in sorted(entries)
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` returned. Collective."""
        parameters = self._parameters()
        entries: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            if not 0 <= index < len(parameters):
                raise ValueError(f"it has a parameter {index}, and this optimizer has {len(parameters)}")
            entries[index] = {}
            for key, value in values.items():
                value = snapshot.fetch(value)
                shape = self._wrapped.shape(parameters[index])
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape:
                    value = self._wrapped.part(parameters[index], value)
                entries[index][key] = value
        self._optimizer.load_state_dict({**state, "state": entries})

    def reload_hyperparameters(self, state: Mapping[str, Any]) -> None:
        """Go back to the hyperparameters of what `state_dict` returned."""
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


class Handover:
    """Takes the parameters out of an optimizer before the model is wrapped, and gives it the wrapped model's.

    In between the optimizer holds none, so that nothing keeps whole parameters alive that have been sharded.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, *, strict: bool) -> None:
        """``strict``: the optimizer may hold nothing but parameters of the model."""
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        self._optimizer = optimizer
        self._groups: list[list[str | nn.Parameter]] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if strict and id(parameter) not in names:
                    raise SetupError(
                        f"group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                        "not in the model: its gradient would differ between the ranks; put everything that it trains "
                        "into one module"
                    )
            self._groups.append([names.get(id(parameter), parameter) for parameter in group["params"]])
        self._state = optimizer.state_dict() if optimizer.state else None

    def begin(self) -> None:
        """Empty the optimizer."""
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._optimizer.state.clear()

    def end(self, wrapped: ParallelModel) -> None:
        """Same groups, same order, same hyperparameters; a state that it had is sharded as the parameters are."""
        parameters = wrapped.parameters()
        for group, names in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = [parameters[each] if isinstance(each, str) else each for each in names]
        wrapped.attach(self._optimizer)
        if self._state is not None:
            try:
                OptimizerState(self._optimizer, wrapped).load_state_dict(self._state)
            except CheckpointError:
                raise
            except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
                raise SetupError(
                    f"the optimizer's state can't be sharded: {error}; make it after parallelize"
                ) from error
