"""Micro-batches: a rank's batches of one step, and their weights in the mean over the global batch.

A step has more samples than fit a rank's memory where gradients are accumulated, and in a job with fewer ranks than
usual, whose steps have as many samples as before. Then a rank computes its samples in several micro-batches, one after
the other. The loader collates each of them from samples of its own, so nothing that `collate_fn` made is split. Not all
ranks have equally many samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flk_runtime.data.partition import shard_range
from flk_runtime.errors import SetupError


@dataclass(frozen=True)
class StepShare:
    """One rank's share of the samples of a step."""

    samples: int  # of the step, over all ranks
    own: int  # samples that this rank was given; 0 if it was given a sample that another rank has too
    pieces: int  # micro-batches in which every rank computes its samples

    def weight(self, world_size: int, fraction: float = 1.0) -> float:
        """The factor of the mean loss of ``fraction`` of this rank's samples.

        With it, the mean over the ranks of the sum of such losses is the mean over all samples of the step.
        """
        return world_size * self.own * fraction / self.samples


class MicroBatches:
    """A rank's micro-batches of one step, which a loader with ``accumulate=`` gives for `Run.micro_batches`.

    ``parts`` are the micro-batches, as ``collate_fn`` made them, and ``fractions`` their shares of the rank's samples.
    All ranks have equally many: a rank with fewer repeats its first one, with the fraction 0.
    """

    def __init__(self, parts: Sequence[Any], counts: Sequence[int], share: StepShare) -> None:
        """``counts``: the number of samples in each of ``parts``."""
        missing = share.pieces - len(parts)
        self.parts = [*parts, *[parts[0]] * missing]
        self.fractions = [count / sum(counts) for count in counts] + [0.0] * missing
        self.share = share


def parts_of(batch: Any) -> tuple[StepShare, Iterator[tuple[Any, float]]]:
    """The share of the step that ``batch`` is, and its micro-batches with their fractions of the rank's samples.

    Raises SetupError for anything else than what a loader with ``accumulate=`` gave.
    """
    if not isinstance(batch, MicroBatches):
        raise SetupError(
            f"micro_batches takes what a loader with accumulate= gives, and was given a {type(batch).__name__}: pass "
            "accumulate=1 or more to run.loader, and its batch as it is; what changes a batch belongs into the loop "
            "over micro-batches"
        )
    return batch.share, zip(batch.parts, batch.fractions, strict=True)


def count_pieces(samples: int, world_size: int, batch_size: int) -> int:
    """The number of micro-batches of at most ``batch_size`` samples for a step of ``samples`` over all ranks.

    It is the same for all ranks: with a sharded model, each forward pass is collective.
    """
    return max(1, -(-samples // (world_size * batch_size)))


def pieces_of(samples: int, pieces: int) -> list[range]:
    """The ranges of ``samples`` that are micro-batches, at most ``pieces``, and none without a sample."""
    return [part for part in (shard_range(samples, number, pieces) for number in range(pieces)) if part]
