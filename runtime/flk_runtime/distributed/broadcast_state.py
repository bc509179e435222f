"""synchronize(): from here on all ranks hold the same model, optimizer state and whatever else is given.

For ranks that do not leave this to a wrapper, such as DistributedDataParallel, or to a snapshot. The name and the
meaning are those of Lux.jl's DistributedUtils.synchronize!!.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.distributed import collectives
from flk_runtime.distributed.consistency import check_consistent
from flk_runtime.distributed.pytree import Node, replace, walk
from flk_runtime.errors import SetupError

T = TypeVar("T")


class _Blank:
    """In the place of a tensor, whose elements come apart."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device.type

    def fits(self, tensor: torch.Tensor) -> bool:
        return vars(_Blank(tensor)) == vars(self)


def synchronize(tree: T, root: int = 0) -> T:
    """``root``'s state in everything that ``tree`` holds, on every rank; returns the tree. Collective.

    Leaves of the nested containers may be modules (all parameters and buffers), optimizers (their whole state and the
    hyperparameters of their groups, also where a rank has made no state yet), and what `collectives.broadcast` takes:
    tensors, arrays and numbers. Modules, optimizers, tensors and writable arrays are changed in place. Any other leaf
    (a string, None, an object) comes back as it was given.

    Raises SetupError on every rank where the ranks' models or optimizers differ in structure, and for models that are
    sharded (FSDP): their wrapper keeps the parts in step. A world of one gets the very tree back.
    """
    if not collectives.begin("synchronize", root=root):
        return tree
    call = f"synchronize(root={root})"
    nodes = list(walk(tree))
    problems = _agree(call, nodes)
    if problems:  # all ranks have the same
        raise SetupError(f"{call}: {problems[0]}")

    owners = [node.value for node in nodes]
    tensors = [tensor for owner in owners if isinstance(owner, nn.Module) for _, tensor in _tensors("", owner)]
    optimizers = [owner for owner in owners if isinstance(owner, Optimizer)]
    states = [
        replace(_state(optimizer), lambda v: _Blank(v) if isinstance(v, torch.Tensor) else v)
        for optimizer in optimizers
    ]
    if states:
        dist.broadcast_object_list(states, src=root)
    for optimizer, state in zip(optimizers, states, strict=True):
        tensors += _take(optimizer, state)
    collectives.broadcast_tensors(list({id(tensor): tensor for tensor in tensors}.values()), root)

    values = iter(collectives.broadcast([node.value for node in nodes if _is_sent(node)], root))
    return replace(tree, lambda leaf: next(values) if collectives.is_content(leaf) else leaf)


def _is_sent(node: Node) -> bool:
    return not node.container and collectives.is_content(node.value)


def _agree(call: str, nodes: list[Node]) -> list[str]:
    """Compare what the ranks give, and return what forbids to send it."""
    lines: list[tuple[str, str]] = []
    problems: list[str] = []
    for path, value, container in nodes:
        if isinstance(value, (nn.Module, Optimizer)):
            lines.append((path, "a module" if isinstance(value, nn.Module) else "an optimizer"))
            if _is_fsdp(value):
                problems.append(f"{path} is sharded, and FullyShardedDataParallel keeps its parts in step")
            tensors = list(_tensors(path, value))
        elif isinstance(value, torch.Tensor):
            tensors = [(path, value)]
        else:
            lines.append((path, container or ("a value" if collectives.is_content(value) else "left alone")))
            tensors = []
        for name, tensor in tensors:
            lines.append((name, collectives.describe(tensor)))
            if problem := collectives.unsendable(tensor):
                problems.append(f"{name} is {lines[-1][1]}, {problem}")
    check_consistent(call, [*lines, *((f"problem {number}", problem) for number, problem in enumerate(problems))])
    return problems


def _tensors(path: str, owner: nn.Module | Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """What all ranks must have alike: a module's parameters and buffers, an optimizer's parameters."""
    if isinstance(owner, nn.Module):
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            yield f"{path}.{name}", tensor
        return
    for number, group in enumerate(owner.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"{path}.param_groups[{number}]['params'][{place}]", parameter


def _is_fsdp(owner: nn.Module | Optimizer) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(owner, nn.Module) and any(isinstance(one, FullyShardedDataParallel) for one in owner.modules())


def _state(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state by the number of the parameter, and its groups without parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {n: dict(optimizer.state[p]) for n, p in enumerate(parameters) if p in optimizer.state},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _take(optimizer: Optimizer, state: dict[str, Any]) -> list[torch.Tensor]:
    """Give the optimizer root's ``state``; its tensors, which root's elements are to fill, in the order of `walk`.

    Tensors that fit are kept, so that what refers to them (a captured graph, say) stays right.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = {node.path: node.value for node in walk(_state(optimizer))}
    paths = iter([node.path for node in walk(state) if not node.container])
    tensors: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        path = next(paths)
        if not isinstance(value, _Blank):
            return value
        tensor = own.get(path)
        if not isinstance(tensor, torch.Tensor) or not value.fits(tensor):
            near = next((one.device for one in parameters if one.device.type == value.device), value.device)
            tensor = torch.empty(value.shape, dtype=value.dtype, device=near)
        tensors.append(tensor)
        return tensor

    filled = replace(state, leaf)
    for number, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if number in filled["state"]:
            optimizer.state[parameter] = filled["state"][number]
    for group, new in zip(optimizer.param_groups, filled["groups"], strict=True):
        for name in set(group) - set(new) - {"params"}:
            del group[name]
        group.update(new)
    return tensors
