"""Protocols of the objects whose state is in a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """An object with a state of tensors, numbers, strings, lists, tuples and dictionaries; rank 0's state is saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class DistributedStateful(ABC):
    """An object whose state is spread over the ranks: all ranks take part in saving and loading it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The whole state on rank 0, with full tensors. Other ranks' return values are not used. Collective."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on rank 0. Collective.

        Large tensors in ``state`` are `Deferred`: the object fetches them one at a time, in the same order
        on all ranks, and keeps its shard.
        """

    def reload_hyperparameters(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore hyperparameters that the constructor of an object registered later may have changed. Not collective.

        The default does nothing.
        """
