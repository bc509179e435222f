"""Micro-batches: parts of a rank's batch that fit its memory, and their weights in the mean over the global batch.

A step has more samples than fit a rank's memory where gradients are accumulated, and in a job with fewer ranks than
usual, whose steps have as many samples as before. Then a rank computes its samples in several micro-batches, one after
the other. Not all ranks have equally many samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flk_runtime.data.partition import shard_range
from flk_runtime.errors import SetupError
from flk_runtime.system import pytree


@dataclass(frozen=True)
class StepShare:
    """One rank's share of the samples of a step."""

    samples: int  # of the step, over all ranks
    own: int  # samples that this rank was given; 0 if it was given a sample that another rank has too
    pieces: int  # micro-batches in which every rank computes its samples

    @property
    def given(self) -> int:
        """The number of samples in this rank's batch."""
        return max(1, self.own)

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


def split(batch: Any, pieces: int, samples: int) -> Iterator[tuple[Any, float]]:
    """Yield ``pieces`` micro-batches of a batch of ``samples``, each with its fraction of the samples.

    ``batch`` is a pytree. Leaves with an entry for each sample are split: tensors and arrays by their first dimension,
    and lists and tuples. The other leaves are the same in each micro-batch. If no leaf has an entry for each sample, as
    where ``collate_fn`` packs samples into fewer rows, the first dimension that all tensors share is split. A list of
    as many tensors as there are samples, each with that first dimension, counts as a list of fields, as torch's
    default_collate makes it. Where there are fewer samples than micro-batches, the last micro-batches are the first
    sample with the fraction 0. Raises SetupError if nothing can be split, or if it is not clear what.
    """
    if pieces == 1 or samples == 1:
        yield batch, 1.0
        yield from [(batch, 0.0)] * (pieces - 1)
        return
    size = _size(batch, samples)

    def is_column(value: Any) -> bool:
        return _is_column(value, size)

    for piece in range(pieces):
        own = shard_range(size, piece, pieces)
        chosen = slice(own.start, own.stop) if own else slice(1)
        part = pytree.map_leaves(batch, lambda leaf, chosen=chosen: _cut(leaf, size, chosen), is_column)  # type: ignore[misc]
        yield part, len(own) / size


def _size(batch: Any, samples: int) -> int:
    """The number of entries of the leaves that are split: ``samples``, or else the first dimension of all tensors."""
    leaves: list[Any] = []
    pytree.map_leaves(batch, leaves.append, lambda value: _is_column(value, samples))
    if any(_has_length(leaf, samples) for leaf in leaves):
        return samples
    sizes = {len(leaf) for leaf in leaves if _is_array(leaf)}
    if len(sizes) != 1:
        raise SetupError(
            f"the batch cannot be split into micro-batches: it has {samples} samples, and no tensor or list in it has "
            "as many entries: have collate_fn keep one entry for each sample"
        )
    return sizes.pop()


def _is_column(value: Any, size: int) -> bool:
    """Whether a list or tuple has an entry for each of ``size`` samples, and is no list of fields."""
    if not _is_list(value) or len(value) != size:
        return False
    if not all(_has_length(each, size) for each in value):
        return True
    if all(map(_is_list, value)):  # samples are of one kind: a tensor beside a list is a field
        raise SetupError(
            f"the batch cannot be split into micro-batches: a list of {size} lists with {size} entries each may be one "
            f"of {size} samples or of {size} fields: have collate_fn return a dictionary of fields"
        )
    return False


def _cut(leaf: Any, size: int, chosen: slice) -> Any:
    return leaf[chosen] if _has_length(leaf, size) else leaf


def _has_length(value: Any, size: int) -> bool:
    return (_is_list(value) or _is_array(value)) and len(value) == size


def _is_array(value: Any) -> bool:
    """Whether this is a tensor, or an array of NumPy, with a dimension."""
    return getattr(value, "ndim", 0) > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
