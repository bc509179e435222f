"""Compilation of blocks by torch.compile, and what an attempt leaves of it to the next one."""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flk_runtime.errors import SetupError
from flk_runtime.system import pytree

_LIMIT: Final = 64 << 20  # bytes of a rank's compiled code that its checkpoints hold


def compile_module(module: nn.Module, given: bool | str | Mapping[str, Any]) -> None:
    """Compile the calls of ``module``, whose class, names of parameters and hooks stay.

    ``given`` is True, the name of a backend, or all options of torch.compile. The module can be copied and pickled.
    """
    options = _options(given)
    if "forward" not in vars(module) and type(module).forward.__module__.startswith("torch."):
        # The compiler skips a frame of torch.nn that it meets first, as of a Sequential or a TransformerEncoderLayer,
        # without a word. It compiles the same frame beneath one of another package.
        module.forward = functools.partial(_forward, module)
    module.compile(**options)
    # Around the compiled code and not a hook, which the compiler would trace.
    module._compiled_call_impl = functools.partial(_call, cast(Any, module._compiled_call_impl))


def wait_before_compiled(model: nn.Module) -> None:
    """Have what a script has compiled of ``model`` get results of collectives as a module of `compile_module` does.

    A module may be compiled by `nn.Module.compile` or by torch.compile, and so may a function in its attributes.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
                vars(module)[name] = functools.partial(_call, value)


def check_recomputed(modules: Iterable[nn.Module], given: bool | str | Mapping[str, Any]) -> None:
    """Raise SetupError if the backend eager would update the statistics of ``modules``, which are recomputed, twice.

    Other backends trace the updates of buffers and make them once.
    """
    if _options(given).get("backend") != "eager":
        return
    for each in (child for module in modules for child in module.modules()):
        if isinstance(each, _BatchNorm) and each.track_running_stats:
            raise SetupError(
                f"compile='eager' with recompute= would update the statistics of a {type(each).__name__} twice in each "
                "step: use compile='aot_eager' or compile=True, or do not recompute this block"
            )


def _options(given: bool | str | Mapping[str, Any]) -> dict[str, Any]:
    """The options of torch.compile."""
    return dict(given) if isinstance(given, Mapping) else {"backend": given} if isinstance(given, str) else {}


# A function of its own, which pickle finds by name.
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _call(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call compiled code once the results of collectives among its arguments are there.

    torch would lose the gradient of one that is not there yet, or give a wrong one, as of its views.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # it takes long

    def wait(leaf: Any) -> Any:
        return cast(Any, _Wait.apply)(leaf) if isinstance(leaf, AsyncCollectiveTensor) else leaf

    if any(isinstance(each, AsyncCollectiveTensor) for each in pytree.leaves((args, kwargs))):
        args, kwargs = pytree.map_leaves((args, kwargs), wait)
    return compiled(*args, **kwargs)


class _Wait(torch.autograd.Function):
    """The identity, whose result is there."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        return cast(torch.Tensor, tensor.trigger_wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has been given ``model`` or a part of it, as a function or as a method."""
    return any(
        hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None for each in model.modules()
    )


class CompiledCode:
    """What the compiler has made in this process: a later attempt in a new pod compiles nothing of it again.

    It is a `flk_runtime.checkpoint.Stateful` with a state on each rank, since the code is for one index of a device.
    Attempts in the same pod find the compiler's own cache on its disk.
    """

    def __init__(self, *, trusted: bool) -> None:
        """``trusted``: the checkpoint comes from the job's own pods. Code from elsewhere would be run unseen."""
        self._trusted = trusted

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The compiler's artifacts as bytes (uint8); none before the first compilation, nor beyond 64 MiB."""
        found = torch.compiler.save_cache_artifacts()
        if not found or len(found[0]) > _LIMIT:
            return {"artifacts": torch.empty(0, dtype=torch.uint8)}
        return {"artifacts": torch.frombuffer(bytearray(found[0]), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Put the artifacts into the compiler's cache of this pod."""
        content = state["artifacts"].contiguous()
        if self._trusted and content.numel():
            torch.compiler.load_cache_artifacts(ctypes.string_at(content.data_ptr(), content.numel()))


def keeps_code() -> bool:
    """Whether this release of torch can hand over compiled code: 2.7 is the first."""
    return hasattr(torch.compiler, "save_cache_artifacts")
