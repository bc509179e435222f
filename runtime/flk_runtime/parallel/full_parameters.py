"""FullParameters: the whole parameters that a sharded unit has gathered, and the passes that use them.

FSDP2 makes the full tensor of each parameter once, at the first gathering. In a pass it is in the place of the shard.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakIdKeyDictionary

from flk_runtime.errors import SetupError
from flk_runtime.parallel.between_passes import BETWEEN_PASSES
from flk_runtime.parallel.model import local
from flk_runtime.parallel.reachable import hidden_tensors
from flk_runtime.parallel.records import any_unreduced, groups_of
from flk_runtime.system import pytree
from flk_runtime.system.bits import bit_sum, is_compared

_OF_MODULES: Final = frozenset(vars(nn.Module()))  # attributes that every module has
_VERSION: Final = operator.attrgetter("_version")  # the number of changes in place that torch has counted
_roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_passes(model: nn.Module, units: Iterable[nn.Module]) -> None:
    """Have passes of ``model`` and its sharded ``units`` train all that they reach, or be refused by name."""
    _roots.add(model)
    BETWEEN_PASSES.watch(model)
    for unit in units:
        FullParameters(unit)


def complete_passes() -> None:
    """Reduce what a backward pass that has ended left in full parameters, because FSDP2 has not seen it.

    FSDP2 sees a backward pass by the tensors of a unit's output. A model may return none, and keep its loss as an
    attribute, or in an object.
    """
    for model in _roots:
        root: Any = model._get_fsdp_state()  # type: ignore[operator]
        groups = (group for state in root._state_ctx.all_states for group in groups_of(state))
        left = [group.reduce_grads for group in groups if any_unreduced(group.fsdp_params)]
        if any(left):
            root._root_post_backward_final_callback()
        if not all(left):
            BETWEEN_PASSES.begin()


def explain(error: RuntimeError) -> SetupError | None:
    """The error to raise in the place of one of a backward pass that comes to parameters in a way that FSDP2 lacks."""
    if not len(_roots):
        return None
    if re.search("setStorage.*storage of size 0", str(error)):
        return SetupError(
            "the backward pass needs parameters of a block that sharding has freed, since it comes from a tensor that "
            "the block has not returned, such as one that a hook has kept: return it, or use strategy ddp without "
            "precision="
        )
    if "mixed torch.Tensor and DTensor" in str(error):
        return SetupError(
            "the loss has a part that was computed of sharded parameters themselves, such as a penalty: compute that "
            "part before the forward pass, and add its full_tensor(), or use strategy ddp without precision="
        )
    if re.search("assign a gradient with dtype|assigned grad has data of a different type", str(error)):
        return SetupError(
            "a gradient has another dtype than its sharded parameter, as after model.double() or model.to(dtype): call "
            "that before parallelize"
        )
    return None


class FullParameters:
    """Watches the passes of a sharded unit.

    A forward pass that changes the full parameters is refused: they are freed, and with them the change. A backward
    pass gathers them also if it comes from a tensor in an object that the unit returns, or in its attributes.

    FSDP2's own hooks call it, since each further hook takes time and breaks the graph of a compiled unit.
    """

    def __init__(self, unit: Any) -> None:
        self._unit = unit
        self._modules = _own_modules(unit)
        self._places = [
            (module._parameters, name)
            for module in self._modules
            for name, each in module._parameters.items()
            if each is not None
        ]
        self._shards = self._registered()
        self._passes = [0, 0]  # without and with gradients
        self._full: list[Any] = []
        self._versions: list[int] = []  # numbers of changes that torch has counted
        self._sums: list[torch.Tensor] = []
        self._hides = False  # tensors, from FSDP2
        self._hooked = WeakIdKeyDictionary()  # tensors in attributes
        state = unit._get_fsdp_state()
        self._state = state
        self._gather = state._pre_backward = _first_order(state._pre_backward)
        _make_faster(unit, state)
        self._stay = False  # full parameters, after a forward pass
        if groups := groups_of(state):  # one
            self._group = groups[0]
            self._begin_pass, self._end_pass = self._group.pre_forward, self._group.post_forward
            self._group.pre_forward, self._group.post_forward = self._before, self._after
            self._free, self._group.reshard = self._group.reshard, self._reshard
        else:  # all parameters are in units inside of it
            unit.register_forward_hook(self._after_units, prepend=True)  # before FSDP2 ends the pass

    def _before(self, *arguments: Any) -> Any:
        BETWEEN_PASSES.end()
        self._refuse_changes_since()
        given = self._begin_pass(*arguments)
        self._passes[torch.is_grad_enabled()] += 1
        self._full = self._registered()
        self._versions = list(map(_VERSION, self._full))
        self._sums = self._sum() if self._is_compared() else []
        return given

    def _after(self, unit: nn.Module, arguments: Any, output: Any) -> Any:
        self._refuse_changes()
        self._look(output)
        result = self._end_pass(unit, arguments, output)
        self._stay = not self._group.is_sharded
        if self._group.is_sharded_post_forward:
            self._full = self._registered()
            self._versions = list(map(_VERSION, self._full))
        return result

    def _reshard(self) -> None:
        self._refuse_changes_since()
        self._free()

    def _refuse_changes_since(self) -> None:
        """Raise SetupError if the script has changed full parameters that the latest forward pass has left."""
        stay, self._stay = self._stay, False
        if not stay:
            return
        changed = list(map(operator.ne, map(_VERSION, self._full), self._versions))
        if not any(changed):
            changed = BETWEEN_PASSES.changed(self._full)
        if any(changed):
            name = self._name_of(changed.index(True))
            raise SetupError(
                f"the script changes the parameter {name!r} after a forward pass with gradients, where the change is "
                "lost, since the parameter is sharded: change it after the backward pass, or make the forward pass in "
                "torch.no_grad()"
            )
        self._full = []  # which FSDP2 may free from now on

    def _name_of(self, place: int) -> str:
        """The name in this unit of a parameter, by its place."""
        parameters, name = self._places[place]
        path = next(path for path, each in self._unit.named_modules() if each._parameters is parameters)
        return f"{path}.{name}".lstrip(".")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_units(self, _: nn.Module, arguments: Any, output: Any) -> None:
        self._passes[torch.is_grad_enabled()] += 1
        self._look(output)

    def _look(self, output: Any) -> None:
        """Look at the ``output`` of a forward pass."""
        if torch.is_grad_enabled() and (self._hides or self._is_compared()):
            self._watch_hidden(output)
        if self._state._state_ctx.iter_forward_root is self._state:  # no other unit around it has been called
            BETWEEN_PASSES.begin()

    def _refuse_changes(self) -> None:
        now = self._registered()
        if any(map(operator.is_, now, self._shards)):  # a backward pass of an inner loss has freed the full ones
            return
        changed: list[bool] = []
        if any(map(operator.is_not, now, self._full)):
            changed = list(map(operator.is_not, now, self._full))
        elif (versions := list(map(_VERSION, now))) != self._versions:
            changed = list(map(operator.ne, versions, self._versions))
        if self._sums and not any(changed):  # torch counts no change by way of parameter.data
            changed = (torch.stack(self._sums) != torch.stack(self._sum())).tolist()
        self._sums = []
        if any(changed):
            raise SetupError(
                f"the forward pass of {type(self._unit).__name__.removeprefix('FSDP')} changes its parameter "
                f"{self._name_of(changed.index(True))!r}, which is lost where it is sharded: use strategy ddp"
            )

    def _watch_hidden(self, output: Any) -> None:
        """Have the backward pass gather the parameters from tensors that FSDP2 does not see."""
        attributes = [
            each
            for module in self._modules
            for name, value in vars(module).items()
            if name not in _OF_MODULES and isinstance(value, (torch.Tensor, list, tuple, dict))
            for each in pytree.leaves(value)
            if isinstance(each, torch.Tensor)
        ]
        for each in hidden_tensors((output, attributes), pytree.leaves(output)):
            self._hides = True
            if each not in self._hooked:
                self._hooked[each] = True
                each.register_hook(self._gather)  # type: ignore[no-untyped-call]

    def _is_compared(self) -> bool:
        return is_compared(self._passes[torch.is_grad_enabled()])

    def _registered(self) -> list[Any]:
        return [parameters.get(name) for parameters, name in self._places]

    def _sum(self) -> list[torch.Tensor]:
        return [bit_sum(local(each)) for each in self._full]


def _own_modules(unit: nn.Module) -> list[nn.Module]:
    """The modules of a sharded unit that are in no unit inside of it."""

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if not isinstance(child, FSDPModule):
                yield from walk(child)

    return list(dict.fromkeys(walk(unit)))


def _unwrapped(method: Any) -> Any:
    """A method of FSDP2 without torch's wrapper, which makes a function that is not compiled anew in each call."""
    return types.MethodType(inspect.unwrap(method.__func__), method.__self__)


def _make_faster(unit: nn.Module, state: Any) -> None:
    """Have the hooks of FSDP2 be made functions that are not compiled once, and not in each call."""
    hooks: Any
    for hooks, handle, method in (
        (unit._forward_pre_hooks, state._pre_forward_hook_handle, state._pre_forward),
        (unit._forward_hooks, state._post_forward_hook_handle, state._post_forward),
    ):
        hooks[handle.id] = torch.compiler.disable(_unwrapped(method))  # type: ignore[no-untyped-call]


def _first_order(gather: Any) -> Any:
    """``gather``, which a backward pass calls where it comes to a unit; an error if another one follows through it."""
    plain = _unwrapped(gather)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def checked(gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise SetupError(
                "create_graph=True, as for a gradient penalty or in torch.func, needs parameters in a second backward "
                "pass, which sharding has freed: use strategy ddp without precision="
            )
        return plain(gradient)

    return checked
