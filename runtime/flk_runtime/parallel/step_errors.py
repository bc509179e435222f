"""explain_errors(): an optimizer that cannot compute with sharded parameters is refused by name at its step.

Optimizers that flatten parameters, index them, or put plain tensors of their own beside them, end with an error of
torch's DTensor, which names neither the optimizer nor a cure.
"""

from __future__ import annotations

import functools
import re
import traceback
import types
from typing import Any

from torch.optim import Optimizer

from flk_runtime.contract.failure import Kind
from flk_runtime.contract.failure_text import kind_of_text
from flk_runtime.errors import SetupError
from flk_runtime.system.faults import kind_of

_BENEATH = re.compile(r"OutOfMemoryError|MemoryError|AcceleratorError|OSError|CUDA error|allocate memory")
_MARK = "_flk_explains"  # attribute of a step that raises the errors of this module


def explain_errors(optimizer: Optimizer) -> None:
    """Have the step of ``optimizer``, whose parameters are sharded, raise SetupError for an error of DTensor."""
    plain: Any = optimizer.step
    if hasattr(plain, _MARK):
        return
    # A method; or a function, which a learning rate scheduler has put in its place.
    function = getattr(plain, "__func__", None) or (lambda self, *args, **kwargs: plain(*args, **kwargs))

    @functools.wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Exception as error:
            if not _is_of_shards(error):
                raise
            raise SetupError(
                f"{type(self).__name__} cannot train parameters that a strategy or precision= shards: "
                f"{str(error).strip().splitlines()[0]}; use another optimizer, or strategy ddp without precision="
            ) from error

    setattr(step, _MARK, True)
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _is_of_shards(error: Exception) -> bool:
    """Whether DTensor itself has raised the error. What is beneath it fails for other reasons."""
    name, text = type(error).__name__, str(error)
    kinds = {kind_of(error), kind_of_text(name, text)}
    if kinds != {Kind.EXCEPTION} or _BENEATH.search(f"{name}: {text}"):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return "DTensor" in text or any("torch/distributed/tensor/" in frame.filename for frame in frames)
