"""Protocols of the objects whose state is in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from flk_runtime.checkpoint.state import State

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject


class Stateful(Protocol):
    """An object that every rank holds alike, such as a learning rate scheduler: rank 0's state is saved.

    The state consists of tensors, numbers, strings, None, lists, tuples and dictionaries. The name and the methods are
    those of `torch.distributed.checkpoint.stateful.Stateful`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class DistributedStateful(ABC):
    """An object whose state is spread over the ranks, such as a sharded model. Each rank saves and loads its own."""

    @abstractmethod
    def save_state(self, name: str) -> State:
        """What this rank holds of the state, with paths that begin with ``name``. No communication, no copies."""

    @abstractmethod
    def load_state(self, saved: SavedObject) -> None:
        """Read this rank's part of the state. Raises CheckpointError or ValueError if it does not fit."""

    def reload_hyperparameters(self, saved: SavedObject) -> None:  # noqa: B027
        """Restore the hyperparameters in ``saved`` again, since an object that was made later may have changed them.

        The default does nothing.
        """
