"""at_first_pass(): do something when a script begins to train, which it does not say: at its first forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def at_first_pass(modules: Iterable[nn.Module], begin: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` before the first call of one of ``modules`` with gradients; now if there is no module.

    The modules may be compiled. Nothing is called where a compiled function of the script calls them, or the script
    calls their ``forward``. Returns a function that has the modules call it no more.
    """
    modules = list(modules)
    if not modules:
        begin()
        return lambda: None
    from torch._dynamo.eval_frame import skip_code  # takes long to import, as the first optimizer does

    # The compiler would trace the hook of a compiled module by itself. In the graph of a function it still does, as
    # without a break there: with fullgraph=True the script would fail.
    skip_code(_FirstPass.__call__.__code__)
    return _FirstPass(modules, torch.compiler.disable(begin)).remove  # type: ignore[no-untyped-call]


class _FirstPass:
    """The hook of the modules. Copies of it, in copies of a module, do nothing."""

    def __init__(self, modules: Iterable[nn.Module] = (), begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._hooks = [each.register_forward_pre_hook(self) for each in modules]

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.remove()
        if self._begin:
            self._begin()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> Any:
        return _FirstPass, ()
