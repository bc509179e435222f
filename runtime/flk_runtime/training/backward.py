"""Backward: loops over micro-batches, and backward passes with the weights of losses in the mean of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flk_runtime.data import StepShare, parts_of
from flk_runtime.errors import SetupError
from flk_runtime.training.context import RunContext
from flk_runtime.training.models import Models
from flk_runtime.training.step.batches import Batches
from flk_runtime.training.step.weighted_mean import WeightedMean, backward


@dataclass
class _Loop:
    """One loop over the micro-batches of a batch."""

    share: StepShare
    parameters: Sequence[nn.Parameter] = ()
    number: int = 0  # of the current micro-batch, from 1
    fraction: float = 1.0  # of the batch that is in the current micro-batch
    passed: int = 0  # the number of the latest micro-batch with a backward pass
    is_weighted: bool | None = None  # whether its passes have weights
    mean: WeightedMean | None = None

    @property
    def is_last(self) -> bool:
        """Whether no micro-batch follows the current one."""
        return self.number == self.share.pieces


class Backward:
    """Divides batches into micro-batches, and weights the losses of their backward passes."""

    def __init__(self, context: RunContext, models: Models, batches: Batches) -> None:
        self._context, self._models, self._batches = context, models, batches
        self._loop: _Loop | None = None  # under way
        self._latest: _Loop | None = None  # that has ended since the latest step
        self.has_looped = False
        """Whether there has been a loop since the latest step, for which `check_step` looks."""

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yield the micro-batches of ``batch``, all but the last one inside of no_sync."""
        if self._loop:
            raise SetupError("micro_batches in a loop over micro-batches: end that loop before this one begins")
        share, parts = parts_of(batch)
        loop = self._loop = _Loop(share, self._models.parameters() if share.pieces > 1 else ())
        self.has_looped = True
        try:
            for part, fraction in parts:
                loop.number, loop.fraction = loop.number + 1, fraction
                with contextlib.nullcontext() if loop.is_last else self._models.no_sync():
                    yield part
            if loop.passed not in (0, loop.number):
                raise SetupError(
                    "the last micro-batch had no backward pass on this rank, so the gradients were not averaged: call "
                    "run.backward for each micro-batch, with weight=0 for one that does not count"
                )
        finally:
            self._loop, self._latest = None, loop

    def backward(self, loss: torch.Tensor, weight: torch.Tensor | float | None) -> None:
        """Compute the gradients of ``loss`` as `Run.backward` does. Collective with a ``weight``."""
        loop, world_size = self._loop, self._context.world_size
        self._batches.passed()
        if loop:
            self._check_pass(loop, is_weighted=weight is not None)
            loop.passed, loop.is_weighted = loop.number, weight is not None
        elif self._latest and not self._latest.passed and self._latest.share is self._batches.latest:
            raise SetupError("backward after a loop over micro-batches without one: call run.backward in that loop")
        if weight is None:
            backward(loss, loop.share.weight(self._batches.parts, loop.fraction) if loop else self._batches.weight())
            return
        is_last = loop is None or loop.is_last
        if is_last and self._models.is_held:
            raise SetupError(
                "backward(weight=) in no_sync(): which passes make one mean is not known: use loader(accumulate=) and "
                "micro_batches, without no_sync()"
            )
        counts = loop.share.own * loop.fraction > 0 if loop else self._batches.counts()
        own = _as_tensor(weight if counts else 0, self._context.options.device)
        if loop:
            mean = loop.mean = loop.mean or WeightedMean(loop.parameters, loop.share.pieces, world_size)
        else:
            mean = WeightedMean((), 1, world_size)
        mean.backward(loss, own, is_last=is_last)

    def check_step(self) -> None:
        """Raise SetupError if a step ends with gradients that are not averaged."""
        loop, self._latest = self._loop or self._latest, None
        self.has_looped = self._loop is not None
        if loop and loop.passed and not loop.is_last:
            raise SetupError(
                f"step after micro-batch {loop.number} of {loop.share.pieces}: the gradients are not averaged yet: "
                "call it after the loop over micro_batches, which has to run to its end"
            )

    def _check_pass(self, loop: _Loop, *, is_weighted: bool) -> None:
        if loop.is_weighted not in (None, is_weighted) or (is_weighted and loop.passed == loop.number):
            raise SetupError(
                "backward(weight=) with a second backward for the same micro-batches: add the losses, each times its "
                "share of the weight, or take a loop over micro_batches for each"
            )


def _as_tensor(weight: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """``weight`` as float64 of shape (). A tensor is not read by the host, and a number is not copied from it."""
    if not isinstance(weight, torch.Tensor):
        return torch.full((), float(weight), dtype=torch.float64, device=device)
    return weight.detach().reshape(()).to(device, torch.float64)
