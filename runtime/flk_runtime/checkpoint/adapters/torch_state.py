"""TorchState: the state of a module or of an optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from flk_runtime.checkpoint.stateful import DistributedStateful

Modules = Mapping[str, nn.Module]  # by the names under which they are saved


class TorchState(DistributedStateful):
    """The state of a module or of an optimizer, for as long as that stays the same object."""

    @abstractmethod
    def is_of(self, thing: Any, modules: Modules) -> bool:
        """Whether this is the state of ``thing``, which is saved together with these modules."""
