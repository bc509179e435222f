"""Protocols of the objects whose state is in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """An object that every rank holds alike, such as a learning rate scheduler: rank 0's state is saved.

    The state consists of tensors, numbers, strings, None, lists, tuples and dictionaries. The name and the methods are
    those of `torch.distributed.checkpoint.stateful.Stateful`.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class DistributedStateful(ABC):
    """An object whose state is spread over the ranks, such as a sharded model: all ranks take part in saving it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0, with full tensors. What the other ranks return is not used. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on rank 0. Collective.

        Large tensors in ``state`` are `LazyBroadcastTensor`: the object fetches one after the other, in the same order
        on all ranks, and keeps its own shard of each.
        """

    def reload_hyperparameters(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the hyperparameters in ``state`` again, since an object that was made later may have changed them.

        The default does nothing.
        """
