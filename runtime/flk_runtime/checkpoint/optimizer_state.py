"""OptimizerState: saves and restores the state of an optimizer, by the names of its parameters.

``state.NAME.KEY`` is a tensor, and so is a number or None, since rank 0 need not have the state of each parameter. All
else is plain: ``param_groups``, ``values`` by name and key, and ``numbers``, the keys whose values are numbers or None.
The names and the tensors are those of torch.distributed.checkpoint.state_dict. A parameter without state, because it
had no gradient yet, has none in the checkpoint and none after it is restored.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint.state import Path, Piece, PieceCache, State, has_tensors, pieces_of
from flk_runtime.checkpoint.stateful import DistributedStateful

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject

# Values that are saved as tensors of shape (), by the dtype of which they are read.
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, type(None): torch.uint8}
_READ: dict[torch.dtype, Callable[[Any], Any]] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float64: float,
    torch.uint8: lambda _: None,
}


class ModelParameters(ABC):
    """How the parameters of a model are named and sharded, and with them the state of its optimizer.

    The defaults are for parameters with the shape of the full one, as plain tensors and DTensors have.
    """

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer takes, by the names of the user's model. A tied one may have several."""

    @abstractmethod
    def state_pieces(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Piece]:
        """What this rank offers of ``value``, from the optimizer's state for ``parameter``."""

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """The shape of the full parameter."""
        return parameter.shape

    def empty_state(self, path: Path, parameter: nn.Parameter, dtype: torch.dtype) -> tuple[torch.Tensor, list[Piece]]:
        """A new tensor for the optimizer's state that is split as ``parameter`` is, and its pieces."""
        value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return value, pieces_of(path, value)


class OptimizerState(DistributedStateful):
    """The state of an optimizer, as it is, for the parameters of one model."""

    def __init__(self, optimizer: Optimizer, model: ModelParameters) -> None:
        self._optimizer, self._model = optimizer, model
        self._cache = PieceCache()
        self._names: dict[nn.Parameter, str] = {}  # of the parameters that the optimizer had when they were made

    def save_state(self, name: str) -> State:
        names = self.names()
        parameters = {own: parameter for parameter, own in names.items()}
        tensors, plain = split_values((own, self._optimizer.state.get(each, {})) for own, each in parameters.items())
        plain["param_groups"] = [
            {**group, "params": [names[parameter] for parameter in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        pieces = self._cache.pieces(
            {(name, "state", *path): value for path, value in tensors.items()},
            lambda path, value: self._model.state_pieces(path, parameters[str(path[2])], value),
        )
        return State(pieces, plain)

    def load_state(self, saved: SavedObject) -> None:
        checkpoint = saved.checkpoint
        parameters = {own: parameter for parameter, own in self.names().items()}
        entries: dict[str, dict[str, Any]] = {}
        pieces: list[Piece] = []
        for full, path in checkpoint.names((saved.name, "state")):
            own, key = str(path[2]), str(path[3])
            parameter = _get(parameters, own)
            if checkpoint.shape(full) and checkpoint.shape(full) == tuple(self._model.full_shape(parameter)):
                value, boxes = self._model.empty_state(path, parameter, checkpoint.dtype(full))
            else:
                value = checkpoint.empty(full)
                boxes = pieces_of(path, value)
            entries.setdefault(own, {})[key] = value
            pieces += boxes
        checkpoint.read(pieces)
        join_values(entries, saved.plain)
        indices = {own: index for index, own in enumerate(parameters)}
        state = {
            "state": {_get(indices, own): values for own, values in entries.items()},
            "param_groups": [
                {**group, "params": [_get(indices, own) for own in group["params"]]}
                for group in saved.plain["param_groups"]
            ],
        }
        with checking_groups(self._optimizer):
            self._optimizer.load_state_dict(state)
        for own, values in saved.plain.get("values", {}).items():
            for key, value in values.items():
                if not has_tensors(value):  # of a text, load_state_dict makes the text of a generator
                    self._optimizer.state[parameters[own]][key] = value

    def reload_hyperparameters(self, saved: SavedObject) -> None:
        for group, values in zip(self._optimizer.param_groups, saved.plain["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def names(self) -> dict[nn.Parameter, str]:
        """The parameters in the optimizer's order, with the names of the user's model, or numbers if it has none."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if list(map(id, parameters)) != list(map(id, self._names)):
            names: dict[int, str] = {}
            for name, parameter in self._model.parameters().items():
                names.setdefault(id(parameter), name)
            self._names = {each: names.get(id(each), f"parameter-{index}") for index, each in enumerate(parameters)}
        return self._names


def split_values(
    states: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[dict[tuple[str, str], torch.Tensor], dict[str, Any]]:
    """The tensors of parameters' states by name and key, and the plain state that goes with them.

    ``states`` are pairs of a parameter's name and its state.
    """
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    numbers: dict[str, str] = {}
    for own, state in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[own, key] = value
            elif type(value) in _DTYPES:
                numbers[key] = type(value).__name__
                tensors[own, key] = torch.tensor(0 if value is None else value, dtype=_DTYPES[type(value)])
            else:
                values.setdefault(own, {})[key] = value
    return tensors, {"values": values, "numbers": numbers}


def join_values(entries: dict[str, dict[str, Any]], plain: Mapping[str, Any]) -> None:
    """Add to the tensors of each parameter what `split_values` has taken out of its state."""
    for key in plain.get("numbers", {}):
        for entry in entries.values():
            value = entry.get(key)  # of other parameters it may be a tensor of the optimizer's
            if value is not None and value.dim() == 0 and value.dtype in _READ:
                entry[key] = _READ[value.dtype](value.item())
    for own, values in plain.get("values", {}).items():
        entries.setdefault(own, {}).update(values)


@contextlib.contextmanager
def checking_groups(optimizer: Optimizer) -> Iterator[None]:
    """Raise ValueError if the state that is loaded meanwhile is of an optimizer of another class.

    It lacks hyperparameters then without which the optimizer cannot do a step.
    """
    needed = [optimizer.defaults.keys() & group.keys() for group in optimizer.param_groups]
    yield
    for keys, group in zip(needed, optimizer.param_groups, strict=True):
        if missing := sorted(keys - group.keys()):
            kind = type(optimizer).__name__
            raise ValueError(f"it is the state of another optimizer than {kind}: its groups have no {missing[0]!r}")


def _get(found: Mapping[str, Any], name: str) -> Any:
    if name not in found:
        raise ValueError(f"unexpected state of {name!r}: the optimizer has no such parameter")
    return found[name]
