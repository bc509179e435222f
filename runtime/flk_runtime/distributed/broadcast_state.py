"""synchronize(): broadcast the state of models and optimizers, so that all ranks hold the same.

DistributedDataParallel and a loaded checkpoint do this by themselves. Name and meaning are the same as for
DistributedUtils.synchronize!! in Lux.jl (FluxMPI.synchronize! before).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.distributed import collectives
from flk_runtime.distributed.consistency import check_consistent, has_fsdp1, parameters_in
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.errors import SetupError
from flk_runtime.system.pytree import Node, map_leaves, walk

T = TypeVar("T")


class _Placeholder:
    """Placeholder for a tensor: its metadata is pickled, its elements are broadcast separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape, self.device = tensor.dtype, tuple(tensor.shape), tensor.device.type

    def matches(self, tensor: torch.Tensor) -> bool:
        return vars(_Placeholder(tensor)) == vars(self)


def synchronize(tree: T, root: int = 0) -> T:
    """Broadcast rank ``root``'s state of everything in ``tree``, and return the tree. Collective.

    Leaves of the nested containers may be modules (all parameters and buffers), optimizers (their whole state and the
    hyperparameters of their groups, even if a rank has no state yet), tensors and numbers. Modules, optimizers and
    tensors are changed in place. Any other leaf (a string, None, an object) is returned unchanged. In a world of one
    the given tree is returned.

    Raises SetupError, on every rank, where the models or optimizers of the ranks differ in structure, and for sharded
    models (FSDP), whose wrapper keeps the shards consistent.
    """
    if not collectives.begin("synchronize", root=root):
        return tree
    nodes = check_alike(f"synchronize(root={root})", tree)
    leaves = [node.value for node in nodes if not node.container]
    optimizers = [leaf for leaf in leaves if isinstance(leaf, Optimizer)]
    states = [
        map_leaves(_state(optimizer), lambda v: _Placeholder(v) if isinstance(v, torch.Tensor) else v)
        for optimizer in optimizers
    ]
    numbers = [leaf for leaf in leaves if collectives.is_number(leaf)]
    sent: list[Any] = [*states, *numbers]
    if sent:
        dist.broadcast_object_list(sent, src=root)
    tensors = [tensor for leaf in leaves if isinstance(leaf, nn.Module) for _, tensor in _tensors("", leaf)]
    for optimizer, state in zip(optimizers, sent, strict=False):
        tensors += _set_state(optimizer, state)
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    _broadcast(list({id(tensor): tensor for tensor in tensors}.values()), root)
    values = iter(sent[len(states) :])
    return map_leaves(tree, lambda leaf: next(values) if collectives.is_number(leaf) else leaf)


def _broadcast(tensors: Sequence[torch.Tensor], root: int) -> None:
    """Copy the elements of rank ``root``'s tensors, which are alike, into the tensors of every rank. Collective."""
    for bucket in collectives.split(tensors):
        flat = collectives.pack(bucket)
        sent = flat.to(comm_device(flat.device))
        if sent.numel():
            dist.broadcast(sent.view(torch.uint8), src=root)  # as bytes: no backend supports every dtype
        if dist.get_rank() != root:
            collectives.unpack(sent.to(flat.device), bucket)


def check_alike(call: str, tree: object) -> list[Node]:
    """The nodes of ``tree``. Raises SetupError on all ranks if it differs between them or cannot be sent. Collective.

    ``call`` names what the ranks are about to do.
    """
    nodes = list(walk(tree))
    if problems := _compare(call, nodes):  # the same on all ranks
        raise SetupError(f"{call}: {problems[0]}")
    return nodes


def _compare(call: str, nodes: list[Node]) -> list[str]:
    """Check that the ranks give the same, and return why it cannot be sent (empty if it can). Collective."""
    lines: list[tuple[str, str]] = []
    problems: list[str] = []
    for path, value, container in nodes:
        if isinstance(value, (nn.Module, Optimizer)):
            lines.append((path, "a module" if isinstance(value, nn.Module) else "an optimizer"))
            if isinstance(value, nn.Module) and has_fsdp1(value):
                problems.append(f"{path} is sharded: FullyShardedDataParallel keeps its shards consistent")
            tensors = list(_tensors(path, value))
        elif isinstance(value, torch.Tensor):
            tensors = [(path, value)]
        elif isinstance(value, complex) or hasattr(value, "__array__"):
            lines.append((path, f"a {type(value).__name__}"))
            problems.append(
                f"{path} is a {type(value).__name__}: pass a tensor, such as torch.as_tensor(…), or a float"
            )
            tensors = []
        else:
            lines.append((path, container or ("a value" if collectives.is_number(value) else "not sent")))
            tensors = []
        for name, tensor in tensors:
            lines.append((name, collectives.describe(tensor)))
            if problem := collectives.unsendable(tensor):
                problems.append(f"{name} is {lines[-1][1]}, {problem}")
    check_consistent(call, [*lines, *((f"problem {number}", problem) for number, problem in enumerate(problems))])
    return problems


def _tensors(path: str, owner: nn.Module | Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that must be alike on all ranks: a module's parameters and buffers, an optimizer's parameters."""
    if isinstance(owner, nn.Module):
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            yield f"{path}.{name}", tensor
        return
    for number, group in enumerate(owner.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"{path}.param_groups[{number}]['params'][{position}]", parameter


def _state(optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer, by number of the parameter, and its groups without their parameters."""
    parameters = parameters_in(optimizer)
    return {
        "state": {n: dict(optimizer.state[p]) for n, p in enumerate(parameters) if p in optimizer.state},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _set_state(optimizer: Optimizer, state: dict[str, Any]) -> list[torch.Tensor]:
    """Set root's ``state``, and return its tensors in the order of `walk`, for root's elements to be broadcast into.

    Tensors of the right shape, dtype and device are kept, so that references to them (of a CUDA graph, say) stay valid.
    """
    parameters = parameters_in(optimizer)
    own = {node.path: node.value for node in walk(_state(optimizer))}
    paths = iter([node.path for node in walk(state) if not node.container])
    tensors: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        path = next(paths)
        if not isinstance(value, _Placeholder):
            return value
        tensor = own.get(path)
        if not isinstance(tensor, torch.Tensor) or not value.matches(tensor):
            device = next((one.device for one in parameters if one.device.type == value.device), value.device)
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        tensors.append(tensor)
        return tensor

    filled = map_leaves(state, leaf)
    for number, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if number in filled["state"]:
            optimizer.state[parameter] = filled["state"][number]
    for group, new in zip(optimizer.param_groups, filled["groups"], strict=True):
        for name in set(group) - set(new) - {"params"}:
            del group[name]
        group.update(new)
    return tensors
