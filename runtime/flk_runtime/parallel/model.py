"""ParallelModel: the interface between a run and a parallelized model; DDP and FSDP are subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import DistributedStateful, ModelParameters, Path, Piece, PieceCache, State, pieces_of

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject


class ParallelModel(ModelParameters, DistributedStateful):
    """A model that is not wrapped: every rank holds all of it, and nothing is communicated.

    This class itself is what a world of one and strategy ``none`` train.
    """

    def __init__(self, model: nn.Module, module: nn.Module | None = None) -> None:
        self.model = model  # the user's
        self.module = module or model  # what the user calls in its place: the wrapper, if there is one
        self._cache = PieceCache()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes accumulate gradients without communication."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``. Collective.

        Returns the norm before, a tensor of shape () that is the same on all ranks. Raises RuntimeError if
        ``error_if_nonfinite`` and the norm is NaN or infinite.
        """
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type, error_if_nonfinite)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer takes, by the names of the user's model. A tied parameter has several."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def attach(self, optimizer: Optimizer) -> None:
        """Hook: called once ``optimizer`` holds the parameters of `parameters`. The default does nothing."""

    # Checkpoints: tensors by the names of the user's model; each rank saves what it holds

    def save_state(self, name: str) -> State:
        tensors: dict[Path, torch.Tensor] = {}
        plain = {}
        for key, value in self.model.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[name, key] = value
            else:
                plain[key] = value
        return State(self._cache.pieces(tensors, self._pieces_of), plain)

    def load_state(self, saved: SavedObject) -> None:
        state = self.model.state_dict()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        saved.checkpoint.read([piece for key in tensors for piece in pieces_of((saved.name, key), tensors[key])])
        # Most tensors are the model's own, and are set now. The model takes the others itself.
        own = {_address(each) for each in (*self.model.parameters(), *self.model.buffers())}
        rest = {key: value for key, value in tensors.items() if _address(value) not in own}
        rest |= {key: saved.plain[key] for key in state if key not in tensors}
        if rest:
            self.model.load_state_dict(rest, strict=False)

    def _pieces_of(self, path: Path, value: torch.Tensor) -> list[Piece]:
        """What this rank offers of an entry of the model's state_dict; of what is not shared, rank 0's is saved."""
        return pieces_of(path, value) if dist.get_rank() == 0 else []

    def state_pieces(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Piece]:
        return pieces_of(path, value) if dist.get_rank() == 0 else []

    def full_tensor(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The full parameter, on rank 0; None or the same elsewhere. Collective."""
        return parameter.detach()

    def local_shard(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of ``full``, a tensor of the shape of the full parameter that every rank has."""
        return full


class SeveralModels(ModelParameters):
    """The parameters of several models, for an optimizer of them all. Names begin with that of the model."""

    def __init__(self, models: Mapping[str, ParallelModel]) -> None:
        self._models = models
        self._owners: dict[int, ParallelModel] = {}  # by the parameter's id, since `parameters` was called

    def parameters(self) -> dict[str, nn.Parameter]:
        found = {}
        for key, model in self._models.items():
            for name, parameter in model.parameters().items():
                found[f"{key}.{name}"] = parameter
                self._owners[id(parameter)] = model
        return found

    def state_pieces(self, path: Path, parameter: nn.Parameter, value: torch.Tensor) -> list[Piece]:
        return self._owners[id(parameter)].state_pieces(path, parameter, value)


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data_ptr(), local.numel()
