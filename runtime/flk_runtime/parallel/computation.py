"""How blocks compute: by torch.compile, and with activations that the backward pass computes again."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flk_runtime.errors import SetupError
from flk_runtime.parallel.precision import is_batch_norm


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module has a ``forward`` in place of its class's, as of a script that recomputes by itself."""
    return "forward" in vars(module)


def recompute_activations(module: nn.Module) -> None:
    """Drop the activations inside ``module`` after each forward pass and compute them again in the backward pass.

    Buffers that the forward pass changes are changed again, as in torch; `check_recomputed` refuses batch norms. The
    module gets a ``forward`` of its own; its class, the names of its parameters and its hooks stay, and it can be
    copied and pickled. `nn.Module.compile` may follow. The method is by Chen et al., "Training Deep Nets with Sublinear
    Memory Cost" (arXiv 1604.06174), as implemented by torch.utils.checkpoint without reentrant autograd.

    Raises SetupError if the module already has a ``forward`` that is not its class's.
    """
    if has_own_forward(module):
        raise SetupError(
            f"recompute=True: a {type(module).__name__} has a forward attribute of its own in place of its class's; "
            "remove the attribute, or recompute other blocks"
        )
    module.forward = functools.partial(_forward, module)


# A function of its own, which pickle finds by name, and around torch's checkpoint, so that the compiler traces it.
def _forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    # With the named arguments as one: of those that are named torch looks for no device whose generator it restores.
    return checkpoint(
        lambda module, named, *args: type(module).forward(module, *args, **named),
        *(module, kwargs, *args),
        use_reentrant=False,
    )


def compile_module(module: nn.Module, given: bool | str | Mapping[str, Any]) -> None:
    """Compile the calls of ``module``, whose class, names of parameters and hooks stay.

    ``given`` is True, the name of a backend, or all options of torch.compile. The module can be copied and pickled.
    """
    options = _options(given)
    if not has_own_forward(module) and type(module).forward.__module__.startswith("torch."):
        # The compiler skips a frame of torch.nn that it meets first, as of a Sequential or a TransformerEncoderLayer,
        # without a word. It compiles the same frame beneath one of another package.
        module.forward = functools.partial(_plain_forward, module)
    module.compile(**options)


def check_compiles() -> None:
    """Raise SetupError if torch refuses to compile whatever is asked for, as in a Python that is newer than it.

    What is wrong with the options, torch says itself as soon as a module is compiled.
    """
    try:
        torch.compile(_plain_forward, backend="eager")  # compiles nothing before the first call
    except RuntimeError as error:
        raise SetupError(
            f"compile= cannot be used: torch {torch.__version__} says {error}; leave compile= out, or use an image "
            "with a torch and a Python that go together"
        ) from None


def check_recomputed(modules: Iterable[nn.Module], given: bool | str | Mapping[str, Any]) -> None:
    """Raise SetupError if the statistics of batch norms in ``modules``, which are recomputed, would be updated twice.

    ``given``: as for `compile_module`, or False. The compiler traces the updates of buffers and makes them once, but
    for the backend eager.
    """
    if given and _options(given).get("backend") != "eager":
        return
    for layer in (child for module in modules for child in module.modules()):
        # A model may be in evaluation mode yet, as those of Transformers are at first. A layer that is frozen stays so.
        may_train = layer.training or any(parameter.requires_grad for parameter in layer.parameters())
        if is_batch_norm(layer) and may_train and getattr(layer, "track_running_stats", False):
            raise SetupError(
                f"recompute= would update the statistics of a {type(layer).__name__} twice in each step: use "
                "compile=True or compile='aot_eager', or do not recompute this block"
            )


def _options(given: bool | str | Mapping[str, Any]) -> dict[str, Any]:
    """The options of torch.compile, which takes some out of the inner dictionary of options: it gets a copy."""
    if isinstance(given, Mapping):
        return {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}
    return {"backend": given} if isinstance(given, str) else {}


# A function of its own, which pickle finds by name.
def _plain_forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)
