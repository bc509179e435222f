"""Names and tensors of a module without the changes of DDP, FSDP and torch.compile, and of parts of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flk_runtime.errors import SetupError

_CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # of activation checkpointing, in names
_DDP = "module."  # of DDP, before each name


class Parts(nn.Module):
    """The parts of one model that this rank holds, such as stages of a pipeline. Other ranks may hold other parts.

    The names are the whole model's, which the parts have kept.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Raises SetupError if two parts have an entry of the same name."""
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(str(number), part)
        names: set[str] = set()
        for key in self.state_dict():
            name = user_name(self, key)
            if name in names:
                raise SetupError(f"two parts of a model have the entry {name!r}: keep the names of the whole model")
            names.add(name)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()


def roots_of(module: nn.Module) -> list[nn.Module]:
    """The modules that a script calls: the parts of `Parts`, or the module itself."""
    return list(module) if isinstance(module, Parts) else [module]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer takes, by the names of the user's module. A tied parameter has several."""
    reshard(module)
    return {user_name(module, name): value for name, value in module.named_parameters(remove_duplicate=False)}


def names_by_id(module: nn.Module) -> dict[int, str]:
    """The user's name of each parameter, by its id. Of a tied parameter it is the first one."""
    return {id(parameter): name for name, parameter in reversed(parameters_of(module).items())}


def reshard(module: nn.Module) -> None:
    """Free full parameters that a forward pass without a backward pass has left, if FSDP2 has sharded the module."""
    for each in module.modules():
        if hasattr(type(each), "set_reshard_after_backward"):  # an FSDPModule; asking the module itself takes long
            cast("Any", each).reshard()


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a DTensor or a ShardedTensor. Their classes are not imported, which takes long."""
    return hasattr(value, "to_local") or hasattr(value, "local_shards")


def local(value: Any) -> torch.Tensor:
    """This rank's share of a tensor, which may be a DTensor; without the gradient."""
    return cast("torch.Tensor", value.detach().to_local() if is_sharded(value) else value.detach())


def user_name(module: nn.Module, name: str) -> str:
    """The user's name of an entry of ``module``, without the parts of wrappers: DDP, torch.compile, recomputation.

    The numbers of `Parts` are left out too.
    """
    if isinstance(module, DistributedDataParallel) and name.startswith(_DDP):  # the rest has no wrapper in most models
        return user_name(module.module, name[len(_DDP) :])
    if "module" not in name and "_orig_mod" not in name and not isinstance(module, Parts):
        return name
    return ".".join(_user_parts(module, name.replace(_CHECKPOINT_WRAPPER, "").split(".")))


def _user_parts(module: nn.Module, parts: list[str]) -> Iterator[str]:
    current: Any = module
    for part in parts:
        wrapped = part == "_orig_mod" or (part == "module" and isinstance(current, DistributedDataParallel))
        wrapped = wrapped or isinstance(current, Parts)
        if not wrapped:
            yield part
        current = getattr(current, part, None)
