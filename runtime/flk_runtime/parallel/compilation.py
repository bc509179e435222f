"""Compilation of blocks by torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn


def compile_module(module: nn.Module, given: bool | str | Mapping[str, Any]) -> None:
    """Compile the calls of ``module``, whose class, names of parameters and hooks stay.

    ``given`` is True, the name of a backend, or all options of torch.compile. The module can be copied and pickled.
    """
    options = dict(given) if isinstance(given, Mapping) else {"backend": given} if isinstance(given, str) else {}
    if "forward" not in vars(module) and type(module).forward.__module__.startswith("torch."):
        # The compiler skips a frame of torch.nn that it meets first, as of a Sequential or a TransformerEncoderLayer,
        # without a word. It compiles the same frame beneath one of another package.
        module.forward = functools.partial(_forward, module)
    module.compile(**options)


# A function of its own, which pickle finds by name.
def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)
