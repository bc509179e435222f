"""CAUSES: why a sharded or replicated training differs from that of the whole model, by what was measured.

The first row that fits is the cause. Each has a condition over `Evidence`, and a sentence with the cure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flk_verify.compare import BEFORE, GRADIENT, Difference, precision, scale_between, tolerance
from flk_verify.watch import Step, Tensors, total_norm

_REDUCED: Final = 1e-3  # eps of a type of reduced precision
_NEAR: Final = 0.02


@dataclass(frozen=True)
class Evidence:
    """What is known of a step that differs."""

    ranks: Step
    whole: Step
    found: list[Difference]
    world_size: int

    @property
    def is_gradient(self) -> bool:
        """Whether gradients differ, and not parameters."""
        return self.found[0].what == GRADIENT

    def fact(self, name: str) -> Any:
        """A fact of the passes on the ranks."""
        return self.ranks.facts[name]

    def differs(self, name: str) -> bool:
        """Whether a fact is another one in the one process."""
        return bool(self.fact(name) != self.whole.facts[name])

    @property
    def has_other_data(self) -> bool:
        """Whether the ranks together had other inputs than the one process."""
        near = precision(self.ranks) ** 0.5 * max(self.fact("sums")[1], 1.0) ** 0.5
        return any(
            abs(one - other) > near * max(abs(one), abs(other), 1.0) ** 0.5
            for one, other in zip(self.fact("sums"), self.whole.facts["sums"], strict=True)
        )

    @property
    def is_reduced(self) -> bool:
        """Whether the ranks have the mean of their gradients, or hold them as shards."""
        factor = scale_between(self.ranks.gradients, self.ranks.mean, tolerance(self.ranks))
        return all(each is None for each in self.ranks.mean) or _is_near(factor, 1)

    @property
    def scale(self) -> float | None:
        """The one factor between the gradients of the ranks and those of the one process, if there is one."""
        return scale_between(self.ranks.gradients, self.whole.gradients, 4 * tolerance(self.ranks))

    def is_scaled_by(self, *factors: float) -> bool:
        """Whether that factor is one of these."""
        return any(_is_near(self.scale, each) for each in factors)

    @property
    def is_missing(self) -> bool:
        """Whether the ranks have no gradient where the one process has one."""
        return all(each.ranks == 0.0 for each in self.found)

    @property
    def has_more(self) -> bool:
        """Whether the ranks have a gradient, which may be 0, where the one process has none."""
        pairs = zip(self.ranks.gradients, self.whole.gradients, strict=True)
        return any(one is not None and other is None for one, other in pairs)

    @property
    def has_local_norm(self) -> bool:
        """Whether each rank's rows are scaled by a factor of their own."""
        rows = [
            [_rows(each, rank, self.world_size) for each in (self.ranks.gradients, self.whole.gradients)]
            for rank in range(self.world_size)
        ]
        return all(
            scale_between(one, other, 4 * tolerance(self.ranks)) is not None for one, other in rows if total_norm(other)
        )


def _is_near(factor: float | None, expected: float) -> bool:
    return factor is not None and abs(factor / expected - 1) < _NEAR


def _rows(tensors: Tensors, rank: int, world_size: int) -> Tensors:
    """The rows of a rank."""
    chunks = [each.chunk(world_size) if each is not None and each.ndim else () for each in tensors]
    return [each[rank] if rank < len(each) else None for each in chunks]


Condition = Callable[[Evidence], bool]

CAUSES: Final[tuple[tuple[str, Condition, str], ...]] = (
    (
        "other parameters before the step",
        lambda it: it.found[0].what == BEFORE,
        "the parameters differed before the step: the script has changed them through .data, replaced one, changed "
        "them on some ranks or between a pass and the step, or drawn them anew as shards: change them in place, alike "
        "on all ranks, after optimizer.step()",
    ),
    (
        "passes without reduction",
        lambda it: it.is_gradient and it.fact("held"),
        "no_sync was left on in the latest backward pass: leave it before the last pass of each step",
    ),
    (
        "not reduced",
        lambda it: it.is_gradient and not it.is_reduced,
        "the ranks have gradients of their own: they were not averaged: call the model that parallelize returned (not "
        "model.module, a part of it or a method), once for each backward pass and outside of no_sync, and take no "
        "gradients of torch.autograd.grad without an average",
    ),
    (
        "other data",
        lambda it: it.has_other_data and not it.differs("calls") and not it.fact("random"),
        "the ranks together and the one process were given other inputs, so the script splits its data by itself, and "
        "batches are not those of one process: take run.loader or loop.loader, or a batch size that is divided by "
        "dist.get_world_size(), with DistributedSampler",
    ),
    (
        "random numbers",
        lambda it: it.fact("random") and (it.has_other_data or it.is_gradient),
        "random numbers of Python, NumPy or a function that flk does not know are drawn in the steps, other ones on "
        "each rank, so the steps cannot be compared: draw with torch, or switch augmentation off for the comparison",
    ),
    (
        "learning rate",
        lambda it: not it.is_gradient and it.differs("hyperparameters"),
        "hyperparameters of the optimizer follow the number of ranks, such as a learning rate times world_size: the "
        "samples of a step are the same in one process, so is the rate that fits them",
    ),
    (
        "sum in place of mean",
        lambda it: it.is_gradient and it.is_scaled_by(1 / it.world_size),
        "all gradients are those of the whole divided by the number of ranks: the loss is a sum over the batch, and "
        "ranks average: take a mean, or multiply the loss by the number of ranks",
    ),
    (
        "multiplied by the ranks",
        lambda it: it.is_gradient and it.is_scaled_by(it.world_size, it.world_size**0.5, it.world_size**2),
        "all gradients are multiplied by the number of ranks, or its root: the script scales the loss or the gradients "
        "by world_size, or adds up what is averaged already",
    ),
    (
        "missing gradients",
        lambda it: it.is_gradient and it.is_missing,
        "the parameters got no gradient: torch has not seen their backward pass, since a block returns an object or "
        "keeps its loss as an attribute, the pass was in no_sync, or the model holds other parameters than the "
        "optimizer (one was replaced, or an optimizer was made before parallelize): return tensors, and pass the "
        "optimizer to parallelize",
    ),
    (
        "a replaced parameter",
        lambda it: it.is_gradient and it.has_more,
        "the ranks train a parameter that the one process does not: the script has replaced it after parallelize, and "
        "a sharded model goes on with the one that it had: change values in place, as parameter.data.copy_()",
    ),
    (
        "clipping by a local norm",
        lambda it: it.is_gradient and it.fact("sharded") and it.has_local_norm,
        "each rank's rows are scaled by a factor of their own, or all by one: the script clips by the norm of its "
        "shards or of its rank: take run.clip_grad_norm, or torch.nn.utils.clip_grad_norm_ of all parameters",
    ),
    (
        "one factor",
        lambda it: it.is_gradient and it.scale is not None,
        "all gradients differ by one factor: the script clips by another norm (as of one rank), or divides the loss by "
        "a number that differs between the ranks, such as their samples or tokens: take run.clip_grad_norm, and "
        "run.backward(loss, weight=count)",
    ),
    (
        "unused parameter",
        lambda it: it.has_more and not it.is_gradient,
        "a parameter that no pass has used has the gradient 0 on the ranks and none in one process, so momentum and "
        "weight decay move it: freeze it while it is not used",
    ),
    (
        "BatchNorm",
        lambda it: it.fact("batch_norm"),
        "BatchNorm takes the statistics of each rank's samples: nn.SyncBatchNorm.convert_sync_batchnorm(model), on "
        "GPUs, or another norm; with BatchNorm, ranks never train as one process",
    ),
    (
        "uneven ranks",
        lambda it: it.is_gradient and it.fact("uneven"),
        "the ranks had different numbers of samples, and their means were averaged alike: run.backward(loss) weights "
        "them, and run.backward(loss, weight=count) by tokens",
    ),
    (
        "other passes",
        lambda it: it.differs("calls"),
        "the one process called the model another number of times: what the script does depends on the number of ranks",
    ),
    (
        "steps of shards",
        lambda it: not it.is_gradient and it.fact("sharded"),
        "the gradients agree, and the optimizer makes other steps of them: it computes with norms, rows or factors of "
        "the shards, as LARS, LAMB and Shampoo do, or the script has changed gradients in its step: take an optimizer "
        "that updates each element by itself, or ddp",
    ),
    (
        "reduced precision",
        lambda it: precision(it.ranks) > _REDUCED and all(each.error < 4 * tolerance(it.ranks) for each in it.found),
        "the passes compute with reduced precision, and the difference is a few times of what that explains: compare "
        "once in float32",
    ),
    (
        "a loss over the samples of a rank",
        lambda it: it.is_gradient and not it.is_missing,
        "no measured cause fits. The gradients are averages over the ranks, so a loss that is no mean over samples "
        "differs: a mean over tokens or labels, of which ranks have other numbers (run.backward(loss, weight=count)), "
        "padding that the model sees, a contrastive loss over the batch, a gradient hook that clips; so do changes of "
        "gradients between backward() and step(), hooks of parameters, and outputs or buffers that a rank holds for "
        "itself",
    ),
)
INCOMPARABLE: Final = ("other data", "random numbers")
"""Causes that say nothing about the training: the two cannot be compared."""
UNKNOWN: Final = "no known cause fits"


def cause_of(evidence: Evidence) -> tuple[str, str]:
    """The name of the first cause that fits and its text."""
    return next(((name, text) for name, fits, text in CAUSES if fits(evidence)), ("", UNKNOWN))
