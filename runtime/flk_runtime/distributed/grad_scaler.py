"""torch's GradScaler unscales the gradients that a DistributedOptimizer has averaged, which a step uses.

GradScaler divides the gradients by the loss scale before it calls the optimizer's step, and has no hook there. So its
`unscale_`, which its `step` calls too, is replaced by one that waits for the averages first. An overflow on one rank is
then in the averages of all, and all skip the step.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import torch
from torch.amp import GradScaler


@runtime_checkable
class Averaging(Protocol):
    """An optimizer that averages gradients before its step."""

    def average(self) -> None:
        """Replace the gradients by their averages, unless that is done for this step. Collective."""

    def end_step(self) -> None:
        """End a step that may have been skipped."""


@functools.cache
def watch_grad_scalers() -> None:
    """Have every GradScaler average before it unscales. A second call does nothing."""
    unscale, step = GradScaler.unscale_, GradScaler.step

    @functools.wraps(unscale)
    def unscale_averages(self: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, Averaging):
            optimizer.average()
        unscale(self, optimizer)

    @functools.wraps(step)
    def step_or_skip(self: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, Averaging):
            optimizer.end_step()
        return result

    GradScaler.unscale_, GradScaler.step = unscale_averages, step_or_skip  # type: ignore[method-assign]
