"""OptimizerWatch: looks at the steps of all optimizers while a run is open.

An optimizer with gradients that nothing averages trains another model on each rank, and one that is in no checkpoint
begins anew after a restart. Neither would say a word.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flk_runtime.checkpoint import has_own_state_dict, is_sharded
from flk_runtime.distributed import is_settled, mean_loss, parameters_in, settle
from flk_runtime.errors import SetupError
from flk_runtime.parallel import is_wrapper, replaced
from flk_runtime.run.batches import Batches
from flk_runtime.system.bits import is_compared


class OptimizerWatch:
    """Refuses steps with gradients that are not averaged, and optimizers of the models that are not saved."""

    def __init__(self, batches: Batches, *, averages: bool, trained: Callable[[], Iterable[nn.Parameter]]) -> None:
        """``averages``: the run has other ranks or workers, with which its strategy averages gradients.

        ``trained``: the parameters of the models.
        """
        self._batches, self._averages, self._trained = batches, averages, trained
        # Those that have stepped, in the order of their first steps, and whether they are known to be saved.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self.scheduled: list[Optimizer] = []
        """The optimizers of which a learning rate scheduler is saved."""
        self._checks = 0  # since an optimizer has stepped for the first time
        self.is_unchecked = False
        """Whether an optimizer has stepped that is not known to be saved."""
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Look at no more steps."""
        for hook in self._hooks:
            hook.remove()

    def check_saved(self, saved: Sequence[Optimizer], may_have_states: Iterable[bool]) -> None:
        """Raise SetupError if a state or a scheduler of an optimizer of the models is not saved.

        ``saved``: the optimizers that are saved. One without a state may have it later, so some of the later calls look
        at it again. ``may_have_states``: of other objects that are saved, whether they may have any of these states.
        """
        self._checks += 1
        if not is_compared(self._checks) or any(may_have_states):
            return
        trained = {id(each) for each in self._trained()}
        for optimizer in [each for each, is_saved in self._stepped.items() if not is_saved]:
            lacks_scheduler = hasattr(optimizer.step, "_wrapped_by_lr_sched") and optimizer not in self.scheduled
            if lacks_scheduler and not trained.isdisjoint(map(id, parameters_in(optimizer))):
                raise SetupError(
                    f"the learning rate scheduler of {type(optimizer).__name__} is in no checkpoint, so it may begin "
                    "anew after a restart: call run.register('scheduler', scheduler), also where its rate follows "
                    "run.steps or epochs"
                )
            # The state_dict() of a wrapper may have the state of the optimizer inside, or both have one state.
            whole = [each for each in saved if each is optimizer or has_own_state_dict(each)]
            others = trained.difference(id(parameter) for each in whole for parameter in parameters_in(each))
            own = [each for each in optimizer.state if id(each) in others]
            if any(all(other.state.get(each) is not optimizer.state[each] for other in saved) for each in own):
                raise SetupError(
                    f"{type(optimizer).__name__} trains the model and is in no checkpoint, so it would begin anew "
                    "after a restart: pass it to parallelize, or call run.register('optimizer', optimizer)"
                )
            self._stepped[optimizer] = bool(optimizer.state)
        self.is_unchecked = not all(self._stepped.values())

    def forget(self) -> None:
        """Keep no parameters alive, since they are about to be replaced."""
        self._seen.clear()

    def stepped(self) -> list[Optimizer]:
        """The optimizers that have stepped, in the order of their first steps."""
        return list(self._stepped)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._averages:
            return None
        self._refuse_others(optimizer)
        if not (args[1:] or kwargs) or {*map(id, parameters_in(optimizer))}.isdisjoint(map(id, self._trained())):
            return None
        return (args[0], *map(_agreed, args[1:])), {name: _agreed(value) for name, value in kwargs.items()}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._averages and (args[1:] or kwargs):  # a closure has computed the gradients
            self._refuse_others(optimizer)
        self._batches.passed()
        if optimizer not in self._stepped:
            self._stepped[optimizer], self.is_unchecked, self._checks = False, True, 0

    def _refuse_others(self, optimizer: Optimizer) -> None:
        """Raise SetupError for a gradient that nothing averages."""
        parameters = parameters_in(optimizer)
        ids = list(map(id, parameters))
        seen = self._seen.get(optimizer)
        if seen is None or seen.ids != ids:  # the first step, or a group was added
            seen = self._seen[optimizer] = _Seen(ids, parameters, [each for each in parameters if not _is_known(each)])
        for each in seen.others:
            # A gradient without requires_grad is one that the script has made.
            if each.grad is None or not each.requires_grad or _is_known(each):
                continue
            settle(list(_wrapped_by_script()))
            if not is_settled(each):
                raise SetupError(
                    f"a parameter of shape {tuple(each.shape)} of {type(optimizer).__name__} was frozen or absent in "
                    "parallelize, so its gradient is not averaged and each rank would train its own: pass its module "
                    "to parallelize, and freeze parameters after it; or call flk.per_rank(optimizer) if each rank "
                    "shall train its own, flk.replicated(optimizer) if the script averages the gradients"
                )


def _agreed(argument: Any) -> Any:
    """An argument of a step; of a closure, one that returns the mean loss, by which LBFGS decides on further calls."""
    return functools.partial(mean_loss, argument) if callable(argument) else argument


@dataclass(frozen=True)
class _Seen:
    """What was seen of an optimizer in its latest step."""

    ids: list[int]
    parameters: list[nn.Parameter]  # kept, so that no other parameter gets the ID of one of them
    others: list[nn.Parameter]  # it was not known how the ranks train them


def _is_known(parameter: nn.Parameter) -> bool:
    """Whether it is known how the ranks train ``parameter``, or another check is for it."""
    return is_settled(parameter) or is_sharded(parameter) or replaced.name_of(parameter) is not None


def _wrapped_by_script() -> Iterator[nn.Parameter]:
    """The trained parameters of all modules that the script has wrapped in DDP or FSDP itself."""
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module) and is_wrapper(type(each)) and not any(map(is_settled, each.parameters())):
            yield from (parameter for parameter in each.parameters() if parameter.requires_grad)
