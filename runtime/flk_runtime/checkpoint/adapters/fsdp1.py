"""The state of a module that a script has wrapped in FSDP1, and of its optimizer, through torch's own functions.

Only FSDP1 can cut its flat parameters into the parameters of the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.module import ModuleState
from flk_runtime.checkpoint.adapters.optimizer import (
    OptimizerState,
    check_groups,
    check_kind,
    join_values,
    kind_of,
    split_values,
)
from flk_runtime.checkpoint.adapters.wrappers import is_sharded
from flk_runtime.checkpoint.state import Chunk, SplitState, chunks_of
from flk_runtime.checkpoint.stateful import Modules
from flk_runtime.checkpoint.values import Path
from flk_runtime.distributed import process_group

if TYPE_CHECKING:
    from flk_runtime.checkpoint.load import SavedObject


class FSDP1ModuleState(ModuleState):
    """The state of a module that is wrapped in FSDP1. Reading it is collective."""

    def entries(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._module))

    def _set(self, state: dict[str, Any], plain: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(self._module, {**state, **plain})


class FSDP1OptimizerState(OptimizerState):
    """The state of an optimizer of the parameters of one module that is wrapped in FSDP1."""

    def __init__(self, optimizer: Optimizer, modules: Modules) -> None:
        super().__init__(optimizer, modules)
        (self._module,) = modules.values()

    def save_state(self, name: str) -> SplitState:
        state = self._state()
        tensors, values = split_values(state["state"].items())
        chunks = _chunks({(name, "state", *path): value for path, value in tensors.items()})
        return SplitState(
            chunks, {"values": values, "param_groups": state["param_groups"], "kind": kind_of(self.optimizer)}
        )

    def load_state(self, saved: SavedObject) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        plain, current = saved.state_dict(), self._state()
        check_kind(self.optimizer, plain)
        check_groups([group["params"] for group in current["param_groups"]], plain["param_groups"])
        known = current["state"]
        found: dict[Path, torch.Tensor] = {}
        for full, path in saved.checkpoint.names((saved.name, "state")):
            value = known.get(path[2], {}).get(path[3])
            found[path] = value if isinstance(value, torch.Tensor) else saved.checkpoint.empty(full)
        saved.checkpoint.read([chunk for path, value in found.items() for chunk in chunks_of(path, value)])
        state = {"state": join_values(found, plain["values"]), "param_groups": plain["param_groups"]}
        # Not strict: a parameter that has had no gradient has no state.
        set_optimizer_state_dict(self._module, self.optimizer, state, options=StateDictOptions(strict=False))

    def held_alike(self) -> dict[str, torch.Tensor]:
        return {}

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return dict(get_optimizer_state_dict(self._module, self.optimizer))


def _chunks(tensors: dict[Path, torch.Tensor]) -> list[Chunk]:
    """The chunks that this rank offers of ``tensors``: its shards, and on rank 0 the tensors that are not sharded."""
    main = process_group.rank() == 0
    return [chunk for path, value in tensors.items() if main or is_sharded(value) for chunk in chunks_of(path, value)]
