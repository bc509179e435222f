"""Micro-batches: pieces of a rank's batch that fit its memory, and their weights in the mean over the global batch.

A step of a job with fewer ranks than usual can have as many samples as before. Then each rank takes more of them, not
all ranks take equally many, and a rank computes them in several pieces, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flk_runtime.data.partition import shard_range
from flk_runtime.errors import SetupError
from flk_runtime.system import pytree


@dataclass(frozen=True)
class StepShare:
    """What one rank was given of the samples of a step."""

    samples: int  # of the step, over all ranks
    own: float  # of them that this rank was given; a sample that several ranks were given counts in parts
    pieces: int  # micro-batches in which every rank computes its samples

    def weight(self, world_size: int, fraction: float = 1.0) -> float:
        """The factor of the mean loss of ``fraction`` of this rank's samples.

        With it, the mean over the ranks of the sum of such losses is the mean over all samples of the step.
        """
        return world_size * self.own * fraction / self.samples


def count_pieces(samples: int, world_size: int, batch_size: int) -> int:
    """The number of micro-batches of at most ``batch_size`` samples for a step of ``samples`` over all ranks.

    It is the same for all ranks: with a sharded model, each forward pass is collective.
    """
    return max(1, -(-samples // (world_size * batch_size)))


def split(batch: Any, pieces: int) -> Iterator[tuple[Any, float]]:
    """Yield ``pieces`` parts of a batch, each with the fraction of the samples that are in it.

    ``batch`` is a pytree with a tensor in which samples are the first dimension; tensors and lists of that length are
    split, and other leaves are the same in each part. Where there are fewer samples than parts, the last parts are the
    first sample with the fraction 0. Raises SetupError if the batch has no tensor with samples.
    """
    if pieces == 1:
        yield batch, 1.0
        return
    sizes = [len(leaf) for leaf in pytree.leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not sizes:
        raise SetupError("the batch cannot be split into micro-batches: it has no tensor whose first dimension counts")
    size = sizes[0]

    def is_column(value: Any) -> bool:
        """Whether a list has one plain value for each sample, such as texts."""
        return isinstance(value, (list, tuple)) and len(value) == size and not any(map(_is_tree, value))

    def part(leaf: Any, samples: range) -> Any:
        if is_column(leaf) or (isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size):
            return leaf[samples.start : samples.stop]
        return leaf

    for piece in range(pieces):
        samples = shard_range(size, piece, pieces)
        fraction = len(samples) / size
        chosen = samples or range(1)
        yield pytree.map_leaves(batch, lambda leaf, chosen=chosen: part(leaf, chosen), is_column), fraction  # type: ignore[misc]


def _is_tree(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or any(node.container for node in pytree.walk(value))
