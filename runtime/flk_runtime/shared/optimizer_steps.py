"""Counts the optimizer steps of a script that calls no step of flk, through torch's hook of all optimizers.

A script may have several optimizers. The steps of one of them count: of the first, until another one steps twice
between two of its steps. So a critic that steps five times as often as its generator counts, two optimizers that step
in turn count once, and an optimizer that replaces another goes on with its count.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

from flk_runtime.contract.record import SOURCES
from flk_runtime.shared.progress import Phase, ProgressPage, own_page

MODULE = "torch.optim.optimizer"


def count(module: types.ModuleType) -> None:
    """Count the steps of this process on its progress page, if ``module``, which is MODULE, has the hook."""
    if register := getattr(module, "register_optimizer_step_post_hook", None):
        register(StepCounter(own_page()))


class StepCounter:
    """The hook, which is called after each step of any optimizer."""

    def __init__(self, page: ProgressPage) -> None:
        self._page = page
        self._steps = -1  # those before this attempt included; -1: no step yet
        self._counted: weakref.ref[Any] | None = None  # the optimizer whose steps count
        self._others: set[int] = set()  # ids of those that have stepped since its latest step

    def __call__(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Count the step, unless a run or a loop of flk does."""
        # torch.distributed.checkpoint makes the state of an optimizer by a step without gradients and with a rate of 0.
        makes_state = named == {"closure": None} and not any(group.get("lr") for group in optimizer.param_groups)
        if makes_state or (self._page.phase != Phase.STARTING and not self._page.counts_optimizers):
            return
        counted = self._counted and self._counted()
        if counted is not optimizer:
            if counted is not None and id(optimizer) not in self._others:
                self._others.add(id(optimizer))
                return
            self._counted = weakref.ref(optimizer)
        self._others.clear()
        if self._steps < 0:
            self._steps = self._begin(optimizer)
        self._steps += 1
        self._page.record_step(self._steps)

    def _begin(self, optimizer: Any) -> int:
        """The steps before this attempt, as `flk.restore` or the optimizer's state tells, after its first step."""
        step, source = self._page.restored, SOURCES[self._page.restored_from]
        own = steps_of(optimizer)
        if own is not None and own - 1 != step:
            step, source = own - 1, "" if own > 1 else "start"
        if step < 0:
            return 0
        self._page.begin_at(step, source)
        return step


def steps_of(optimizer: Any) -> int | None:
    """The steps of an optimizer by its own count, as Adam has, which a script restores with its state."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            try:
                return max(1, int(step))
            except (TypeError, ValueError, RuntimeError):
                return None
    return None
