"""The optimizer of a parallelized model: how it changes to the sharded parameters, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import DistributedStateful, Path, Piece, PieceCache, State, pieces_of
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.parallel.model import ParallelModel

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_TYPES = {kind.__name__: kind for kind in _NUMBERS}


class OptimizerState(DistributedStateful):
    """The state of an optimizer of a parallelized model, in the form of torch.distributed.checkpoint.state_dict.

    Parameters have the names of the user's model. ``state.NAME.KEY`` is a tensor, ``param_groups`` a plain value.
    """

    def __init__(self, optimizer: Optimizer, parallel: ParallelModel) -> None:
        self._optimizer, self._parallel = optimizer, parallel
        self._cache = PieceCache()

    def save_state(self, name: str) -> State:
        tensors: dict[Path, torch.Tensor] = {}
        parameters: dict[Path, nn.Parameter] = {}
        values: dict[str, dict[str, Any]] = {}  # that are neither tensors nor numbers
        numbers: dict[str, str] = {}  # the keys of numbers, with their types
        names = self._names()
        for parameter, own in names.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if type(value) in _NUMBERS:  # a tensor, since rank 0 need not have the state of this parameter
                    numbers[key] = type(value).__name__
                    value = torch.tensor(value, dtype=_NUMBERS[type(value)])
                if isinstance(value, torch.Tensor):
                    path = (name, "state", own, key)
                    tensors[path], parameters[path] = value, parameter
                else:
                    values.setdefault(own, {})[key] = value
        groups = [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        pieces = self._cache.pieces(
            tensors, lambda path, value: self._parallel.state_pieces(path, parameters[path], value)
        )
        return State(pieces, {"param_groups": groups, "values": values, "numbers": numbers})

    def load_state(self, saved: SavedObject) -> None:
        checkpoint = saved.checkpoint
        indices = {name: index for index, name in enumerate(self._names().values())}
        parameters = list(self._names())
        entries: dict[int, dict[str, Any]] = {
            indices[name]: dict(values) for name, values in saved.plain.get("values", {}).items()
        }
        pieces: list[Piece] = []
        for full, path in checkpoint.names((saved.name, "state")):
            name, key = str(path[2]), path[3]
            if name not in indices:
                raise ValueError(f"unexpected state of {name!r}: the optimizer has no such parameter")
            parameter = parameters[indices[name]]
            if checkpoint.shape(full) == tuple(self._parallel.full_shape(parameter)) and checkpoint.shape(full):
                value, own = self._parallel.empty_state(path, parameter, checkpoint.dtype(full))
            else:
                value = checkpoint.empty(full)
                own = pieces_of(path, value)
            entries.setdefault(indices[name], {})[str(key)] = value
            pieces += own
        checkpoint.read(pieces)
        for key, kind in saved.plain.get("numbers", {}).items():
            for entry in entries.values():
                if key in entry:
                    entry[key] = _TYPES[kind](entry[key].item())
        groups = [
            {**group, "params": [indices[name] for name in group["params"]]} for group in saved.plain["param_groups"]
        ]
        self._optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def reload_hyperparameters(self, saved: SavedObject) -> None:
        for group, values in zip(self._optimizer.param_groups, saved.plain["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def shard(self, state: dict[str, Any]) -> None:
        """Load ``state``, which is of full tensors, as `torch.optim.Optimizer.load_state_dict` takes it."""
        parameters = list(self._names())
        entries = {
            index: {
                key: self._parallel.local_shard(parameters[index], value)
                if isinstance(value, torch.Tensor)
                and value.dim()
                and value.shape == self._parallel.full_shape(parameters[index])
                else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": entries})

    def _names(self) -> dict[nn.Parameter, str]:
        """The parameters in the optimizer's order, with the names of the user's model, or numbers if it has none."""
        names: dict[int, str] = {}
        for name, parameter in self._parallel.parameters().items():
            names.setdefault(id(parameter), name)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {each: names.get(id(each), f"parameter-{index}") for index, each in enumerate(parameters)}


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
        OptimizerState(optimizer, parallel).shard(state)
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
