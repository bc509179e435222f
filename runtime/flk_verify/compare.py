"""What counts as a difference between the steps of the ranks and those of the whole model in one process.

Both begin each step with equal parameters: after a step, the one process takes the ranks' values. So differences of
rounding do not add up, and the tolerance is the same in each step:

- gradients: ``|g_ranks - g_whole| <= 2 * sqrt(eps) * max(|g_whole|, |g_ranks|, floor)``, norms over a parameter, with
  eps of the coarsest type among parameters, gradients and results of the passes: 7e-4 in float32, 0.18 in bfloat16. The
  floor is ``max(0.01, 4 * sqrt(eps))`` times the root mean square of all gradients of the optimizer, since a gradient
  that is 0 but for rounding, as of the bias of a key in attention, has no digit in common with itself.
- parameters after the step: the changes of a parameter by ``0.05 + 2 * tolerance``, where its elements have had
  gradients that agree. Here eps is of the optimizer's own results too: Muon computes in bfloat16. An optimizer that
  divides by a gradient's size makes a whole step of what was rounding.
- parameters before a step: by 16 * eps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Final

import torch

from flk_verify.watch import Step, Tensors, total_norm, wide

BEFORE: Final = "parameter before the step"
GRADIENT: Final = "gradient"
_SAME: Final = 16.0  # eps by which parameters that are equal may differ
_UPDATE: Final = 0.05
_FLOOR: Final = 0.01


@dataclass(frozen=True)
class Difference:
    """A parameter that differs, and by how much."""

    what: str  # BEFORE, GRADIENT, or change of the parameter
    place: int  # of the parameter in its optimizer
    largest: float  # difference of an element
    ranks: float  # norm of the ranks' tensor
    whole: float  # norm of the one process's
    error: float  # norm of the difference, relative to the larger one of both norms


class Comparison:
    """Compares the steps of one optimizer, one after the other."""

    def __init__(self) -> None:
        self.largest = 0.0
        """The largest relative difference of a gradient so far."""
        self._agreeing: dict[int, torch.Tensor] = {}  # elements whose gradients have agreed in all steps

    def before(self, ranks: Step, whole: Step) -> list[Difference]:
        """The differences before a step: those of parameters, else those of gradients."""
        eps = ranks.facts["eps"]
        pairs = zip(ranks.parameters, whole.parameters, strict=True)
        found = [
            _difference(BEFORE, place, one, other)
            for place, (one, other) in enumerate(pairs)
            if float((wide(one) - wide(other)).norm()) > _SAME * eps * float(wide(other).norm()) + 1e-30
        ]
        return found or self._gradients(ranks, whole)

    def after(self, step: Step, ranks: list[torch.Tensor], whole: list[torch.Tensor]) -> list[Difference]:
        """Which changes of parameters by a step differ. ``step`` is that of the ranks."""
        allowed = _UPDATE + 2 * tolerance(step)
        found = []
        for place, (before, one, other) in enumerate(zip(step.parameters, ranks, whole, strict=True)):
            where = self._agreeing[place]
            one_change, other_change = (torch.where(where, wide(each) - wide(before), 0) for each in (one, other))
            rounding = _SAME * step.facts["eps"] * float(wide(before).norm())
            size = float((one_change - other_change).norm())
            if not size <= allowed * float(other_change.norm()) + rounding:
                found.append(_difference("change of the parameter", place, one_change, other_change))
        return found

    def _gradients(self, ranks: Step, whole: Step) -> list[Difference]:
        allowed, found = tolerance(ranks), []
        elements = sum(each.numel() for each in ranks.parameters)
        floor = max(_FLOOR, 4 * math.sqrt(precision(ranks))) * total_norm(whole.gradients) / math.sqrt(elements)
        for place, (one, other) in enumerate(zip(ranks.gradients, whole.gradients, strict=True)):
            like = whole.parameters[place]
            one, other = (torch.zeros_like(like) if each is None else each for each in (one, other))
            one, other = wide(one), wide(other)
            difference = _difference(GRADIENT, place, one, other)
            least = floor * math.sqrt(like.numel())
            scale = max(difference.ranks, difference.whole, least)
            mean = ranks.mean[place]
            apart = 0.0 if mean is None else float((one - wide(mean)).norm())
            if not max(difference.error * max(difference.ranks, difference.whole), apart) <= allowed * scale:
                found.append(difference)
            elif scale > least:
                self.largest = max(self.largest, difference.error)
            agree = (one - other).abs() <= max(_FLOOR, allowed) * other.abs()
            self._agreeing[place] = agree & self._agreeing.get(place, torch.tensor(True))
        return found


def precision(step: Step) -> float:
    """The eps of the coarsest type that a step computes with."""
    gradients = (torch.finfo(each.dtype).eps for each in step.gradients if each is not None)
    return float(max(itertools.chain(gradients, (step.facts["eps"], step.facts["compute_eps"]))))


def tolerance(step: Step) -> float:
    """By how much the gradients of a parameter may differ, relative to the larger norm."""
    return 2 * math.sqrt(precision(step))


def scale_between(ranks: Tensors, whole: Tensors, within: float) -> float | None:
    """The one factor between all gradients of the ranks and of the one process; None if there is no such factor."""
    pairs = zip(ranks, whole, strict=False)
    both = [(one, other) for one, other in pairs if one is not None and other is not None]
    flat = [torch.stack([wide(each).flatten() for each in pair]) for pair in both]
    one, other = torch.cat(flat, dim=1) if flat else torch.zeros(2, 0)
    size = float(other.norm())
    factor = float((one * other.conj()).sum().real) / size**2 if size else 0.0
    rest = float((one - factor * other).norm())
    return factor if size and rest <= within * float(one.norm()) and factor else None


def _difference(what: str, place: int, ranks: torch.Tensor, whole: torch.Tensor) -> Difference:
    ranks, whole = wide(ranks), wide(whole)
    apart, norms = ranks - whole, (float(ranks.norm()), float(whole.norm()))
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    if any(not math.isfinite(each) for each in norms) and torch.equal(ranks.isfinite(), whole.isfinite()):
        apart = torch.where(apart.isfinite(), apart, 0)  # both have overflown alike
    error = float(apart.norm()) / max(norms) if max(norms) else 0.0
    return Difference(what, place, largest, *norms, 0.0 if error != error and norms[0] != norms[0] else error)
