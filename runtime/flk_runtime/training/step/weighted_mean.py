"""WeightedMean: the gradient of one mean over micro-batches of all ranks, whose weights are known one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from flk_runtime.distributed import comm_device
from flk_runtime.errors import SetupError


class WeightedMean:
    """The backward passes of one step, with ``parts`` micro-batches on each rank.

    The gradients are averages over the ranks of sums over the micro-batches. The sum of all weights is known at the
    last micro-batch only. Until then weights are divided by an estimate, which is the same on all ranks, so that the
    gradients do not overflow in float16; after the last pass the gradients are corrected. Everything is computed on the
    device of the weights, so the host does not wait for it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int, world_size: int) -> None:
        """``parameters``: the trained parameters. Gradients that they have already stay, and the new ones are added.

        Raises SetupError for several micro-batches without parameters.
        """
        if parts > 1 and not parameters:
            raise SetupError("backward(weight=) in several micro-batches needs a model of parallelize: call it before")
        self._parameters, self._parts, self._world_size = parameters, parts, world_size
        self._estimate: torch.Tensor | None = None
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._sum = torch.zeros((), dtype=torch.float64)

    def backward(self, loss: torch.Tensor, weight: torch.Tensor, *, is_last: bool) -> None:
        """Compute the gradients of ``loss``, whose weight is a float64 tensor of shape (). Collective.

        It communicates in the first and in the last micro-batch.
        """
        if self._parts == 1:
            backward(loss, _ratio(weight * self._world_size, self._over_ranks(weight)))
            return
        if self._estimate is None:
            first = self._over_ranks(weight) * self._parts
            self._estimate = torch.where(first == 0, 1.0, first)
            self._set_gradients_apart()
        self._sum = self._sum.to(weight.device) + weight
        backward(loss, weight * self._world_size / self._estimate)
        if is_last:
            self._correct(_ratio(self._estimate, self._over_ranks(self._sum)))

    @torch.no_grad()
    def _set_gradients_apart(self) -> None:
        """Begin with gradients of 0. Most scripts have set them to None, and nothing is copied."""
        for parameter, gradient in self._gradients():
            self._before[parameter] = gradient.clone()
            gradient.zero_()

    @torch.no_grad()
    def _correct(self, factor: torch.Tensor) -> None:
        for parameter, gradient in self._gradients():
            gradient.mul_(factor.to(gradient.device))
            if parameter in self._before:
                gradient.add_(self._before[parameter])

    def _gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """The gradients, or this rank's shards of them, by parameter."""
        return [
            (parameter, parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad)
            for parameter in self._parameters
            if parameter.grad is not None
        ]

    def _over_ranks(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' weights. Collective."""
        if self._world_size == 1:
            return weight
        total = weight.to(comm_device(weight.device), copy=True)
        dist.all_reduce(total)
        return total.to(weight.device)


def backward(loss: torch.Tensor, factor: torch.Tensor | float) -> None:
    """Compute the gradients of ``loss`` times ``factor``, a number or a tensor of shape ()."""
    if isinstance(factor, torch.Tensor):
        factor = factor.to(loss.device)  # and not compared, for which the host would wait
    elif factor == 1.0:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    (loss * factor).backward()  # type: ignore[no-untyped-call]


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """``part / whole``, and 0 where all weights are 0."""
    return torch.where(whole == 0, 0.0, part / whole)
