"""at_first_pass(): do something when a script begins to train, which it does not say: at its first forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from flk_runtime.system import rng
from flk_runtime.system.torch_private import skip_code

DRAWN = (
    "random numbers drawn between {call} and the first pass of a model are those of the first attempt, as is right for "
    "a split of the data; but batches drawn so repeat those of step 0: {advice}"
)
"""Said after a resume, with the call that has restored the state, and what to do."""


def at_first_pass(modules: Iterable[nn.Module], begin: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` before the first call of one of ``modules`` with gradients; now if there is no module.

    The modules may be compiled. Nothing is called where a compiled function of the script calls them, or the script
    calls their ``forward``. Returns a function that has the modules call it no more.
    """
    modules = list(modules)
    if not modules:
        begin()
        return lambda: None
    # The compiler would trace the hook of a compiled module by itself. In the graph of a function it still does, as
    # without a break there: with fullgraph=True the script would fail.
    skip_code(_FirstPass.__call__.__code__)
    return _FirstPass(modules, torch.compiler.disable(begin)).remove  # type: ignore[no-untyped-call]


def set_random_states_at_first_pass(
    modules: Iterable[nn.Module], set_states: Callable[[], None], say_drawn: Callable[[], None]
) -> Callable[[], None]:
    """Call ``set_states`` as `at_first_pass` does, and ``say_drawn`` if the script draws random numbers until then.

    Those are the numbers of the first attempt, as a split of the data needs them. A batch of them is that of step 0.
    Nothing is said where ``set_states`` changes nothing, since the states have been set before.
    """
    before = rng.get_state()

    def begin() -> None:
        drawn = rng.get_state()
        set_states()
        if drawn not in (before, rng.get_state()):
            say_drawn()

    return at_first_pass(modules, begin)


class _FirstPass:
    """The hook of the modules. Copies of it, in copies of a module, do nothing."""

    def __init__(self, modules: Iterable[nn.Module] = (), begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._hooks = [module.register_forward_pre_hook(self) for module in modules]

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
