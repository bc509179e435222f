"""PlacedOptimizer: an optimizer whose state is saved whole, by the places of its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint.adapters.optimizer import check_kind, has_own_state_dict, kind_of, load_as_saved
from flk_runtime.checkpoint.adapters.wrappers import names_by_id
from flk_runtime.checkpoint.stateful import Declared
from flk_runtime.distributed import parameters_in
from flk_runtime.errors import MismatchError

_ADDED: Final = "flk.optimizer"  # the key of what flk adds to a state_dict()


class PlacedOptimizer:
    """An optimizer that is saved as its state_dict() has it, which knows parameters by their numbers only.

    It is a `Stateful`. The checkpoint has the names of the parameters too, in their order, and the state is refused
    where they have another order.
    """

    def __init__(self, optimizer: Optimizer, modules: Iterable[nn.Module]) -> None:
        """``modules``: those that may have parameters of ``optimizer``. Others are known by their shapes."""
        self.optimizer = optimizer
        self._names: dict[int, str] = {}
        for module in modules:
            self._names = names_by_id(module) | self._names

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state_dict(), with its class and the names of its parameters.

        Raises CheckpointError if it has none on each rank.
        """
        kind, _ = added = kind_of(self.optimizer)
        try:
            state = self.optimizer.state_dict()
        except RuntimeError as error:  # as of ZeroRedundancyOptimizer, which gathers it first
            raise MismatchError(
                f"cannot save the optimizer {kind}, whose state_dict() does not say what this rank has: use a strategy "
                f"that shards, such as shard_grad_op, instead of it ({' '.join(str(error).split())})"
            ) from error
        dtypes = [each.dtype for each in parameters_in(self.optimizer)]
        return {**state, _ADDED: {"kind": added, "order": self._order(), "dtypes": dtypes}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of another optimizer, or of parameters in another order."""
        if _ADDED not in state:
            raise ValueError("it was saved by the names of the parameters: pass the optimizer as it was passed then")
        added, own = state[_ADDED], self._order()
        check_kind(self.optimizer, {**added, "param_groups": ()})
        if added["order"] != own:
            pairs = zip(_flat(added["order"]), _flat(own), strict=False)
            saved, found = next((pair for pair in pairs if pair[0] != pair[1]), ("one set of groups", "another one"))
            raise ValueError(
                f"the optimizer has its parameters in another order, {found} where {saved} was: give them to it in the "
                "same order"
            )
        content = {key: value for key, value in state.items() if key != _ADDED}
        if has_own_state_dict(self.optimizer):
            self.optimizer.load_state_dict(content)
        else:
            parameters = parameters_in(self.optimizer)
            before = zip(parameters, added.get("dtypes", ()), strict=False)
            cast = {number for number, (each, dtype) in enumerate(before) if each.dtype != dtype}
            load_as_saved(self.optimizer, content, parameters, cast=cast)

    def _order(self) -> list[list[str]]:
        return [
            [self._names.get(id(each)) or f"a parameter of shape {tuple(each.shape)}" for each in group["params"]]
            for group in self.optimizer.param_groups
        ]


def _flat(order: list[list[str]]) -> list[str]:
    return [f"{name!r} of group {number}" for number, names in enumerate(order) for name in names]


def placed(thing: Optimizer | Declared, modules: Iterable[nn.Module]) -> Declared:
    """``thing``, an optimizer that is saved by the places of its parameters, with their names."""
    declared = thing if isinstance(thing, Declared) else Declared(thing, replicated=True)
    return Declared(PlacedOptimizer(declared.thing, modules), replicated=declared.replicated)  # type: ignore[arg-type]
