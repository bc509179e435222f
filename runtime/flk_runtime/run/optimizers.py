"""OptimizerWatch: looks at the steps of all optimizers while a run is open.

An optimizer with gradients that nothing averages trains another model on each rank, and one that is in no checkpoint
begins anew after a restart. Neither would say a word.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flk_runtime.checkpoint import is_sharded
from flk_runtime.distributed import is_settled, settle
from flk_runtime.errors import SetupError
from flk_runtime.parallel import is_wrapper, parameters_in, replaced


class OptimizerWatch:
    """Refuses steps with gradients that are not averaged, and optimizers of the models that are not saved."""

    def __init__(self, *, averages: bool) -> None:
        """``averages``: the run has other ranks or workers, with which its strategy averages gradients."""
        self._averages = averages
        self._new: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # have stepped, and were not looked at yet
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Look at no more steps."""
        for hook in self._hooks:
            hook.remove()

    def check_saved(self, trained: Callable[[], Iterable[nn.Parameter]], saved: Iterable[Optimizer]) -> None:
        """Raise SetupError if an optimizer of ``trained`` parameters has a state, and is none of those ``saved``."""
        for optimizer in [each for each in self._new if each.state]:
            own = {id(each) for each in trained()} & {id(each) for each in optimizer.state}
            if own.difference(id(each) for other in saved for each in parameters_in(other)):
                raise SetupError(
                    f"{type(optimizer).__name__} trains the model and is in no checkpoint, so it would begin anew "
                    "after a restart: pass it to parallelize, or call run.register('optimizer', optimizer)"
                )
            self._new.discard(optimizer)
            self._known.add(optimizer)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._averages:
            _refuse_others(optimizer)

    def _after(self, optimizer: Optimizer, *arguments: Any) -> None:
        if self._averages and any(arguments):  # a closure has computed the gradients
            _refuse_others(optimizer)
        if optimizer not in self._known:
            self._new.add(optimizer)


def _refuse_others(optimizer: Optimizer) -> None:
    """Raise SetupError for a gradient that nothing averages."""
    for each in parameters_in(optimizer):
        if replaced.name_of(each):  # which has a check of its own
            continue
        # A gradient without requires_grad is one that the script has made.
        if each.grad is None or not each.requires_grad or is_settled(each) or is_sharded(each):
            continue
        settle(list(_wrapped_by_script()))
        if not is_settled(each):
            raise SetupError(
                f"a parameter of shape {tuple(each.shape)} of {type(optimizer).__name__} was frozen or absent in "
                "parallelize, so its gradient is not averaged and each rank would train its own: pass its module to "
                "parallelize, and freeze parameters after it; or call flk.per_rank(optimizer) if each rank shall train "
                "its own, flk.replicated(optimizer) if the script averages the gradients"
            )


def _wrapped_by_script() -> Iterator[nn.Parameter]:
    """The trained parameters of all modules that the script has wrapped in DDP or FSDP itself."""
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and is_wrapper(type(each)) and not any(map(is_settled, each.parameters())):
            yield from (parameter for parameter in each.parameters() if parameter.requires_grad)
