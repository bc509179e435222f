"""Blocks: the repeated parts of a model, such as transformer layers, which are sharded and compiled one by one."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from flk_runtime.checkpoint import user_name
from flk_runtime.errors import SetupError
from flk_runtime.parallel.precision import Precision

Selector = type[nn.Module] | str
Blocks = Selector | Iterable[Selector]

# Containers: their parent calls what they hold, never the container.
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module, wanted: Blocks | None) -> list[nn.Module]:
    """The blocks of ``model``, inner ones before those around them; the model itself is never a block.

    ``wanted`` is a class, its name, a path such as ``layers.*``, or several of these. By default a block is a module in
    a ModuleList, ModuleDict or Sequential that holds at least two modules of this class, if the class is made of
    further modules; blocks within blocks are not searched for.

    Raises SetupError if the model has no module of a wanted class or path.
    """
    if wanted is None:
        return list(_repeated(model))
    selectors: list[Any] = (
        [wanted] if isinstance(wanted, (str, type)) or not isinstance(wanted, Iterable) else list(wanted)
    )
    names = {id(module): user_name(model, name) for name, module in model.named_modules()}
    chosen = {key for selector in selectors for key in _selected(model, names, selector)}
    found = [module for module in inner_first(model) if id(module) in chosen and module is not model]
    for module in found:
        if isinstance(module, _NOT_CALLED):
            name, kind = names[id(module)], type(module).__name__
            raise SetupError(f"blocks has {name!r}, a {kind}, which is not called: name its parts, as in '{name}.*'")
    return found


def shardable_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The ``blocks`` that hold parameters, none of which a module outside of the block shares.

    A tied weight has to be gathered together with all modules that use it, so a block with a weight that is tied to one
    outside is sharded as a part of what is around it.
    """

    def uses(whole: nn.Module) -> Counter[int]:  # of parameters, and of modules, which may be shared too
        found = (
            child for module in whole.modules() for child in (*module._parameters.values(), *module._modules.values())
        )
        return Counter(id(thing) for thing in found if thing is not None)

    everywhere = uses(model)
    return [
        block
        for block in blocks
        if any(True for _ in block.parameters()) and all(everywhere[key] == count for key, count in uses(block).items())
    ]


def find_ends(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The embeddings and heads of ``model``: children of these classes that are at least as large as a block."""
    size = min((sum(parameter.numel() for parameter in block.parameters()) for block in blocks), default=None)
    return [
        child
        for child in model.children()
        if isinstance(child, (nn.Embedding, nn.Linear))
        and size is not None
        # Not child.weight, which a parametrization such as spectral_norm computes, and changes its buffers.
        and (weight := child._parameters.get("weight")) is not None
        and weight.numel() >= size
    ]


def sharded_units(
    model: nn.Module, blocks: Iterable[nn.Module], precision: Precision | None, *, ends: bool = True
) -> list[nn.Module]:
    """The modules that FSDP gathers and reduces one by one: blocks, and modules that compute in float32.

    With ``ends``, which is the default where the script does not name blocks, `find_ends` too.
    """
    in_float32 = [module for module in model.modules() if precision and precision.computes_in_float32(module)]
    apart = find_ends(model, blocks := list(blocks)) if ends else []
    return shardable_blocks(model, dict.fromkeys([*blocks, *apart, *in_float32]))


def inner_first(model: nn.Module) -> list[nn.Module]:
    """All modules of ``model``, each once and after those inside it, as their constructors end."""
    found: list[nn.Module] = []
    visited: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module not in visited:
            visited.add(module)
            for child in module.children():
                walk(child)
            found.append(module)

    walk(model)
    return found


def kept_units(model: nn.Module, units: Collection[nn.Module], *, ends: bool) -> list[nn.Module]:
    """The units whose parameters the backward pass needs right after the forward pass: the model, and heads."""
    return [model, *(child for child in model.children() if ends and isinstance(child, nn.Linear) and child in units)]


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


def _selected(model: nn.Module, names: Mapping[int, str], wanted: Any) -> Collection[int]:
    """The ids of the modules of a class or at a path."""
    if not isinstance(wanted, (str, type)):
        raise SetupError(f"blocks={wanted!r}: expected classes of modules, names or paths")
    by_class = {
        id(module)
        for module in model.modules()
        if any(wanted in (kind, kind.__name__) for kind in type(module).__mro__)
    }
    chosen = by_class or {key for key, name in names.items() if isinstance(wanted, str) and _matches(name, wanted)}
    if not chosen:
        text = wanted if isinstance(wanted, str) else wanted.__name__
        have = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.children())})
        parts = [name for name, _ in model.named_children()]
        raise SetupError(
            f"blocks={text!r}: the model has no module of this class or path; it has {', '.join(have)}, and the "
            f"parts {', '.join(parts)}"
        )
    return chosen


def _matches(path: str, pattern: str) -> bool:
    """Whether a path is of the form of ``pattern``, in which ``*`` stands for anything but a dot."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))
