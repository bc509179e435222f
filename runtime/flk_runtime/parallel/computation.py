"""How blocks compute: by torch.compile, and with activations that the backward pass computes again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flk_runtime.errors import SetupError
from flk_runtime.parallel.blocks import Blocks, find_blocks

# Elements of a buffer that may have been changed where its version does not say so: batch norms change statistics so.
_SMALL = 1 << 16
_BATCH_NORM = "_BatchNorm"  # the base class of torch's batch norms


def find_recomputed(model: nn.Module, blocks: Sequence[nn.Module], wanted: bool | Blocks) -> list[nn.Module]:
    """The modules to recompute: all ``blocks`` (True), none (False), or those that ``wanted`` selects as blocks.

    Raises SetupError if there is none, or ``wanted`` does not fit the model.
    """
    if wanted is False:
        return []
    found = list(blocks) if wanted is True else find_blocks(model, wanted, "recompute")
    if not found:
        advice = "name their class, as in blocks='Block'" if wanted is True else "name other modules"
        raise SetupError(f"recompute={wanted!r} needs blocks, and the model has none: {advice}")
    return found


def recompute_activations(module: nn.Module) -> None:
    """Drop the activations inside ``module`` after each forward pass and compute them again in the backward pass.

    Buffers that the forward pass changes, such as the statistics of BatchNorm, are changed once. The module gets a
    ``forward`` of its own; its class, the names of its parameters and its hooks stay, and it can be copied and pickled.
    `nn.Module.compile` may follow. The method is by Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv
    1604.06174), as implemented by torch.utils.checkpoint without reentrant autograd.

    Raises SetupError if the module already has a ``forward`` that is not its class's.
    """
    if "forward" in vars(module):
        raise SetupError(
            f"recompute=True: a {type(module).__name__} has a forward attribute of its own in place of its class's; "
            "remove the attribute, or recompute other blocks"
        )
    module.forward = functools.partial(_forward, module)


# A function of its own, which pickle finds by name, and around torch's checkpoint, so that the compiler traces it.
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_pass, module, [], *args, use_reentrant=False, **kwargs)


def _pass(module: nn.Module, kept: list[_Buffers], *args: Any, **kwargs: Any) -> Any:
    """A forward pass of ``module``; or its recomputation, once ``kept`` has the buffers that the forward pass changed.

    A recomputation sees these buffers as the forward pass did, and leaves them as it finds them.
    """
    # The compiler changes buffers once by itself. What it cannot trace so, it leaves to torch's checkpoint.
    if torch.compiler.is_compiling():
        return type(module).forward(module, *args, **kwargs)
    if kept:
        with kept[0].as_before():
            return type(module).forward(module, *args, **kwargs)
    buffers = _Buffers(module)
    output = type(module).forward(module, *args, **kwargs)
    buffers.keep_changed()
    kept.append(buffers)
    return output


def compile_module(module: nn.Module, given: bool | str | Mapping[str, Any]) -> None:
    """Compile the calls of ``module``, whose class, names of parameters and hooks stay.

    ``given`` is True, the name of a backend, or all options of torch.compile. The module can be copied and pickled.
    """
    options = _options(given)
    if "forward" not in vars(module) and type(module).forward.__module__.startswith("torch."):
        # The compiler skips a frame of torch.nn that it meets first, as of a Sequential or a TransformerEncoderLayer,
        # without a word. It compiles the same frame beneath one of another package.
        module.forward = functools.partial(_plain_forward, module)
    module.compile(**options)


def check_recomputed(modules: Iterable[nn.Module], given: bool | str | Mapping[str, Any]) -> None:
    """Raise SetupError if the backend eager would update the statistics of ``modules``, which are recomputed, twice.

    Other backends trace the updates of buffers and make them once.
    """
    if _options(given).get("backend") != "eager":
        return
    for each in (child for module in modules for child in module.modules()):
        is_batch_norm = any(kind.__name__ == _BATCH_NORM for kind in type(each).__mro__)
        if is_batch_norm and getattr(each, "track_running_stats", False):
            raise SetupError(
                f"compile='eager' with recompute= would update the statistics of a {type(each).__name__} twice in each "
                "step: use compile='aot_eager' or compile=True, or do not recompute this block"
            )


def _options(given: bool | str | Mapping[str, Any]) -> dict[str, Any]:
    """The options of torch.compile."""
    return dict(given) if isinstance(given, Mapping) else {"backend": given} if isinstance(given, str) else {}


# A function of its own, which pickle finds by name.
def _plain_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class _Buffers:
    """The buffers of a module as they are before a forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [(each._buffers, name) for each in module.modules() for name in each._buffers]
        self._now = [table[name] for table, name in self._places]
        self._versions = [_version(each) for each in self._now]
        copies = {id(each): each.clone() for each in self._now if each is not None}  # modules may share one
        self._before = [copies.get(id(each)) for each in self._now]

    def keep_changed(self) -> None:
        """Forget the buffers that the forward pass has certainly left as they were."""
        places, before = [], []
        for place, tensor, version, copy in zip(self._places, self._now, self._versions, self._before, strict=True):
            is_same = place[0].get(place[1]) is tensor and _version(tensor) == version
            if not is_same or (tensor is not None and tensor.numel() <= _SMALL):
                places.append(place)
                # A tensor that another one has replaced may have a gradient.
                before.append(tensor if _version(tensor) == version and not is_same else copy)
        self._places, self._before, self._now, self._versions = places, before, [], []

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the buffers are copies of what they were; after it, they are again what they are now."""
        now = [table.get(name) for table, name in self._places]
        copies = {id(each): each.clone() for each in self._before if each is not None}
        for (table, name), each in zip(self._places, self._before, strict=True):
            table[name] = copies.get(id(each))
        try:
            yield
        finally:
            for (table, name), each in zip(self._places, now, strict=True):
                table[name] = each


def _version(tensor: torch.Tensor | None) -> int:
    """The number of changes of a tensor in place; 0 of one that cannot be changed so."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
