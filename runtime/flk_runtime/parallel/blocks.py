"""Blocks: the repeated parts of a model, which are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flk_runtime.errors import SetupError

Blocks = type[nn.Module] | str | int | Iterable[type[nn.Module] | str]

# Modules that are never called themselves, or whose parts their parent reads without calling them.
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_READ_BY_PARENT = (nn.MultiheadAttention,)


def find(model: nn.Module, wanted: Blocks | None) -> list[nn.Module]:
    """The blocks of ``model``, inner ones before those around them. The model itself is none.

    ``wanted`` is a class or its name, several of them, or a number: then a module is a block where what it holds
    outside of smaller blocks is at least that many parameters. By default a block is a module in a ModuleList,
    ModuleDict or Sequential that holds at least two of its class, where that class is made of further modules; blocks
    within blocks are not looked for.

    Raises SetupError where a class is not in the model.
    """
    if wanted is None:
        return list(_repeated(model))
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted < 1:
            raise SetupError(f"blocks={wanted}: expected a number of parameters from 1 on")
        found: list[nn.Module] = []
        _large(model, wanted, found, set())
        return [module for module in found if module is not model]
    classes = [wanted] if isinstance(wanted, (str, type)) else wanted
    if not isinstance(classes, Iterable):
        raise SetupError(f"blocks={wanted!r}: expected classes of modules, their names, or a number of parameters")
    return _of_classes(model, list(classes))


def units(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that can be sharded on their own: with parameters, and none that a module outside shares (a tied
    weight must be gathered together with all its users, so such a block is left to the unit around it)."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    result = []
    for block in blocks:
        inside = Counter(id(p) for module in block.modules() for p in module._parameters.values() if p is not None)
        if inside and all(uses[key] == times for key, times in inside.items()):
            result.append(block)
    return result


def rewire(blocks: Iterable[nn.Module], *, recompute: bool, backend: str | None) -> None:
    """Let each block drop its activations and compute them again in the backward pass, or run compiled by
    torch.compile's ``backend``, or both. Names of modules and parameters stay.

    A block gets a subclass of its class, in place. Blocks of one class share one compiled program.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for block in blocks:
        kind = type(block)
        if "forward" in vars(block):
            raise SetupError(f"a {kind.__name__} has a forward of its own instance: it can't be recomputed or compiled")
        if kind not in classes:
            classes[kind] = _subclass(kind, recompute=recompute, backend=backend)
        block.__class__ = classes[kind]


def _subclass(kind: type[nn.Module], *, recompute: bool, backend: str | None) -> type[nn.Module]:
    forward: Callable[..., Any] = kind.forward
    if recompute:
        forward = _recomputed(forward)
    if backend is not None:
        # Around the recomputation, so that the compiler sees what is kept and what is not.
        forward = torch.compile(forward, backend=backend)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def again(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        return checkpoint(forward, self, *args, use_reentrant=False, **kwargs)

    return again


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _is_block(child, module):
            yield child
        else:
            yield from _repeated(child)


def _is_block(child: nn.Module, container: nn.Module) -> bool:
    return (
        not isinstance(child, _NOT_CALLED)
        and any(True for _ in child.children())
        and any(True for _ in child.parameters())
        and sum(type(other) is type(child) for other in container.children()) > 1
    )


def _large(module: nn.Module, least: int, found: list[nn.Module], seen: set[int]) -> int:
    """The parameters below ``module`` that no block has; adds the blocks below it, and itself where it is one."""
    if isinstance(module, _READ_BY_PARENT):
        own = list(module.parameters())
        children = 0
    else:
        own = [p for p in module._parameters.values() if p is not None]
        children = sum(_large(child, least, found, seen) for child in module.children())
    count = children + sum(p.numel() for p in own if id(p) not in seen)
    seen.update(map(id, own))
    if count >= least and not isinstance(module, _NOT_CALLED):
        found.append(module)
        return 0
    return count


def _of_classes(model: nn.Module, classes: list[type[nn.Module] | str]) -> list[nn.Module]:
    there = {kind for module in model.modules() for kind in type(module).__mro__}
    for wanted in classes:
        if not isinstance(wanted, (str, type)):
            raise SetupError(f"blocks holds {wanted!r}: expected classes of modules, or their names")
        if not any(wanted in (kind, kind.__name__) for kind in there):
            name = wanted if isinstance(wanted, str) else wanted.__name__
            have = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.children())})
            raise SetupError(f"the model has no {name} to make a block of; it is made of {', '.join(have)}")
    found: list[nn.Module] = []
    _walk_classes(model, classes, found, set())
    return [module for module in found if module is not model]


def _walk_classes(
    module: nn.Module, classes: list[type[nn.Module] | str], found: list[nn.Module], seen: set[int]
) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        _walk_classes(child, classes, found, seen)
    if any(wanted in (kind, kind.__name__) for wanted in classes for kind in type(module).__mro__):
        found.append(module)
