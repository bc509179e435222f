"""Loader: batches of a map-style dataset, with the arithmetic that gives each rank its share of every step.

The order of an epoch depends on (seed, epoch) only (see `order`). So what is left of it after an interruption can be
divided among any number of ranks. torch's DataLoader does the loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from flk_runtime.data import order
from flk_runtime.data.loader import EpochLoader, LoaderContext, Position
from flk_runtime.data.partition import DataShard, shard_range
from flk_runtime.errors import MismatchError, SetupError

_BLOCK = 4096  # samples whose indices are computed by one call


def step_sizes(samples: int, world_size: int, full: int, *, drop_last: bool) -> tuple[int, int]:
    """(number of steps, samples of the last step) of an epoch in which ``samples`` are left.

    Every other step has ``full`` samples, over all ranks. A remainder of at least ``world_size`` is a step of its
    own; a smaller one is added to the last full step. If there is no full step (only after a resume with more ranks,
    see `rank_share`), the remainder is a step all the same. ``drop_last`` drops the remainder.
    """
    steps, remainder = divmod(samples, full)
    if remainder == 0 or drop_last:
        return steps, full if steps else 0
    if remainder >= world_size or steps == 0:
        return steps + 1, remainder
    return steps, full + remainder


def rank_share(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """The range [begin, end) of a rank's samples in a step of ``size``: contiguous, the first ranks have one more.

    Every rank needs at least one sample for its gradient. There are fewer samples than ranks only if an epoch is
    resumed with more ranks; then several ranks get the same sample, which counts once for the position.
    """
    if size < world_size:
        begin = rank * size // world_size
        return begin, begin + 1
    part = shard_range(size, rank, world_size)
    return part.start, part.stop


def own_samples(size: int, world_size: int, rank: int) -> int:
    """The number of a rank's samples in a step of ``size``; a sample of several ranks counts for the first of them."""
    begin, end = rank_share(size, world_size, rank)
    repeats = rank > 0 and rank_share(size, world_size, rank - 1)[0] == begin
    return 0 if repeats else end - begin


class Loader(EpochLoader):
    """Batches of this rank's share of a map-style dataset, as tensors on the run's device. Made by `Run.loader`.

    Raises SetupError for a dataset without length and index, and for one that is too small.
    """

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, Mapping):
            raise SetupError(f"{type(dataset).__name__} has no length and index: a loader needs a map-style dataset")
        if isinstance(dataset, DataShard):
            raise SetupError(
                "the data is already a shard of one rank: give the loader the whole data, and it splits it"
            )
        super().__init__(context)
        options = context.options
        self._shuffle, self._drop_last = options.shuffle is not False, options.drop_last
        self._order = order.SHUFFLED if self._shuffle else order.OWN  # a checkpoint brings its own
        self._dataset = dataset
        self._samples = self._count_samples()  # of the current epoch
        self._source: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_BatchSampler(self),
            generator=self._generator,
            **{"pin_memory": context.device.type == "cuda", **options.of_torch},
        )

    def __len__(self) -> int:
        """Number of steps of a whole epoch; the same on every rank."""
        samples = len(self._dataset)
        return step_sizes(samples, self._world_size, self._step_size, drop_last=self._drop_last)[0]

    def _count_samples(self) -> int:
        """The length of the dataset, which may be another one in each epoch. Raises SetupError if it is too small."""
        context, samples = self._context, len(self._dataset)
        least = context.step_size if self._drop_last else 1 if context.evaluates else context.world_size
        if samples < least:
            unit = "a step of all ranks takes" if self._drop_last else "there are ranks"
            raise SetupError(f"{self.name}: the dataset has {samples} samples, fewer than {unit} ({least})")
        return samples

    def _batches(self) -> Iterator[Any]:
        self._samples = samples = self._count_samples()
        at = self._at
        if at.consumed and at.data != samples:
            raise MismatchError(
                f"{self.name}: the dataset has {samples} samples, and had {at.data} when epoch {at.epoch} began, in "
                "the checkpoint or before its loop was left"
            )
        source = self._timed(self._source)
        self._seed_workers()
        for size in self._sizes(samples - at.consumed):
            self._context.events.draw()  # before the batch: reading it may draw random numbers
            # Counted here, and not by the batch sampler: DataLoader's workers sample ahead of what has been yielded.
            yield self._give(next(source), size, own_samples(size, self._world_size, self._rank), samples)

    def _state(self, at: Position) -> dict[str, Any]:
        return {"samples": at.data, "shuffle": self._shuffle, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`.

        Raises CheckpointError for a dataset of another kind or order, and for an order that is not known. The length
        is compared where the rest of an epoch begins: a script may set it before each epoch.
        """
        if "samples" not in state:
            raise MismatchError(
                f"{self.name}: the checkpoint is of an iterable, and this is data with an index: resume with the same "
                "data, or give the loader another name="
            )
        if state.get("shuffle", self._shuffle) != self._shuffle:
            raise MismatchError(
                f"{self.name}: shuffle={self._shuffle} here, and shuffle={state['shuffle']} in the checkpoint"
            )
        kind = state.get("order", order.EARLIER if self._shuffle else order.OWN)
        if kind not in order.KINDS:
            raise MismatchError(
                f"{self.name}: the checkpoint is of samples in the order {kind!r}, which this release of flk does not "
                "know: resume with the release that wrote it"
            )
        self._restore(state, state["samples"])
        self._order = kind

    def indices(self) -> Iterator[list[int]]:
        """Yield this rank's indices for each step that is left of the epoch."""
        epoch_order = order.EpochOrder(self._order, self._samples, self._seed, self._at.order)
        for shares in _blocks(self._positions()):
            found = epoch_order.at(torch.cat([torch.arange(share.start, share.stop) for share in shares]))
            for indices in torch.split(found, [len(share) for share in shares]):
                yield indices.tolist()

    def _positions(self) -> Iterator[range]:
        """Yield the positions of this rank's samples for each step that is left of the epoch."""
        position = self.consumed
        for size in self._sizes(self._samples - position):
            begin, end = rank_share(size, self._world_size, self._rank)
            yield range(position + begin, position + end)
            position += size

    def _sizes(self, left: int) -> Iterator[int]:
        """Yield the number of samples, over all ranks, of each step of an epoch in which so many are left."""
        steps, last = step_sizes(left, self._world_size, self._step_size, drop_last=self._drop_last)
        for step in range(steps):
            yield last if step == steps - 1 else self._step_size


def _blocks(ranges: Iterator[range]) -> Iterator[list[range]]:
    """Yield the ranges in lists with about `_BLOCK` numbers each."""
    block: list[range] = []
    count = 0
    for each in ranges:
        block.append(each)
        count += len(each)
        if count >= _BLOCK:
            yield block
            block, count = [], 0
    if block:
        yield block


class _BatchSampler:
    """DataLoader's batch sampler: the indices that are left of the loader's epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()

    def __len__(self) -> int:
        return len(self._loader)
