"""synchronize(): broadcast the state of models and optimizers, so that all ranks hold the same.

DistributedDataParallel and a loaded checkpoint do this by themselves. Name and meaning are the same as for
DistributedUtils.synchronize!! in Lux.jl (FluxMPI.synchronize! before).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.serialization import default_restore_location

from flk_runtime.distributed import collectives
from flk_runtime.distributed.consistency import has_fsdp1, parameters_in
from flk_runtime.distributed.process_group import comm_device
from flk_runtime.system.pytree import leaves, map_leaves

T = TypeVar("T")


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
    check_alike(f"synchronize(root={root})", tree)
    for optimizer in leaves(tree):
        if isinstance(optimizer, Optimizer):
            _send_state(optimizer, root)
    sent = [leaf for leaf in leaves(tree) if collectives.is_number(leaf)]
    if sent:
        dist.broadcast_object_list(sent, src=root)
    tensors = leaves([_tensors(leaf) for leaf in leaves(tree) if isinstance(leaf, (nn.Module, torch.Tensor))])
    broadcast({id(tensor): tensor for tensor in tensors}.values(), root)
    numbers = iter(sent)
    return map_leaves(tree, lambda leaf: next(numbers) if collectives.is_number(leaf) else leaf)


def broadcast(tensors: Iterable[torch.Tensor], root: int = 0) -> None:
    """Give all ranks the elements of rank ``root``'s tensors, which are as large everywhere. Collective."""
    for bucket in collectives.split(tensors):
        flat = collectives.pack(bucket)
        elements = flat.to(comm_device(flat.device))
        if elements.numel():
            dist.broadcast(elements.view(torch.uint8), src=root)  # as bytes: no backend supports every dtype
        if dist.get_rank() != root:
            collectives.unpack(elements.to(flat.device), bucket)


def check_alike(call: str, tree: object) -> None:
    """Raise SetupError on all ranks if ``tree`` differs between them or cannot be sent. Collective.

    ``call`` names what the ranks are about to do.
    """
    collectives.check(call, map_leaves(tree, _tensors), _described)


def _tensors(leaf: Any) -> Any:
    """The tensors that must be alike on all ranks: a module's parameters and buffers, an optimizer's parameters."""
    if isinstance(leaf, nn.Module) and not has_fsdp1(leaf):
        return {**dict(leaf.named_parameters()), **dict(leaf.named_buffers())}
    return [group["params"] for group in leaf.param_groups] if isinstance(leaf, Optimizer) else leaf


def _described(leaf: Any) -> tuple[str, str]:
    if isinstance(leaf, nn.Module):
        return "a module", "sharded: FullyShardedDataParallel keeps its shards consistent"
    if isinstance(leaf, torch.Tensor):
        return collectives.describe(leaf), collectives.unsendable(leaf)
    if not collectives.is_number(leaf):
        return collectives.described_value(leaf)
    return "a value", ""


def _send_state(optimizer: Optimizer, root: int) -> None:
    """Give the optimizer rank ``root``'s state and hyperparameters. Collective."""
    content: list[Any] = [None]
    if dist.get_rank() == root:
        states = [optimizer.state.get(parameter) for parameter in parameters_in(optimizer)]
        groups = [
            {key: value for key, value in group.items() if key != "params" and not callable(value)}
            for group in optimizer.param_groups
        ]
        torch.save((states, groups), file := io.BytesIO())
        content = [file.getvalue()]
    dist.broadcast_object_list(content, src=root)
    if dist.get_rank() == root:
        return
    # A tensor on the CPU, such as a number of steps, stays there. Others are where their parameter is, and never on the
    # device of another rank.
    device = str(next((parameter.device for parameter in parameters_in(optimizer)), "cpu"))
    states, groups = torch.load(
        io.BytesIO(content[0]),
        map_location=lambda storage, place: default_restore_location(storage, "cpu" if place == "cpu" else device),  # type: ignore[no-untyped-call]
        weights_only=False,
    )
    for parameter, state in zip(parameters_in(optimizer), states, strict=True):
        state = map_leaves(state, partial(_near, parameter))
        optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[parameter] = state
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        # Functions are the script's on each rank, since those that are made in a function cannot be sent.
        own = {key: value for key, value in group.items() if key == "params" or callable(value)}
        group.clear()
        group.update({**new, **own})


def _near(parameter: nn.Parameter, leaf: Any) -> Any:
    return leaf.to(parameter.device) if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" else leaf
