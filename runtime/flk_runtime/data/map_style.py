"""Loader: batches of a map-style dataset, with the arithmetic that gives each rank its share of every step.

The order of an epoch depends on (seed, epoch) only (see `order`), or is a sampler's. So what is left of it after an
interruption can be divided among any number of ranks. torch's DataLoader does the loading, a micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, default_collate

from flk_runtime.contract import user_env
from flk_runtime.data import order
from flk_runtime.data.loader import EpochLoader, Iteration, LoaderContext, Position
from flk_runtime.data.micro_batches import StepShare, pieces_of
from flk_runtime.data.partition import shard_range
from flk_runtime.data.samplers import DrawnOrders, SampledOrder
from flk_runtime.errors import MismatchError, SetupError, setting


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

    Raises SetupError for a dataset that is too small.
    """

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        super().__init__(dataset, context)
        options = context.options
        self._drop_last = options.drop_last
        of_torch = dict(options.of_torch)
        self._drawn = _drawn_orders(of_torch, context, len(dataset))
        self._is_batched = self._drawn is not None and self._drawn.batched  # a position counts batches, not samples
        # The least number that is a step of its own at the end of an epoch, also where an elastic job lacks ranks: its
        # epochs have as many steps as with all. Batches of a sampler are never joined.
        self._least_rest = (
            1 if self._is_batched else max(self._world_size, context.full_world_size, setting(user_env.STANDS_FOR))
        )
        shuffled = order.OWN if options.shuffle is False else order.SHUFFLED
        self._order = order.SAMPLED if self._drawn else shuffled
        self._samples = len(dataset)  # of the current epoch
        if not self._drawn:
            self._check_size("dataset", self._samples)
        self._make_source = partial(
            DataLoader,
            dataset,
            batch_sampler=_BatchSampler(self),
            generator=self._generator,
            collate_fn=of_torch.pop("collate_fn", None) or default_collate,
            # Without workers, collate_fn may move the batch to the device, which cannot be pinned.
            **{"pin_memory": context.device.type == "cuda" and of_torch.get("num_workers", 0) > 0, **of_torch},
        )
        self._source = self._make_source()

    def __len__(self) -> int:
        """Number of steps of a whole epoch; the same on every rank. Raises TypeError for a sampler without a length."""
        length = self._drawn.length if self._drawn else len(self.dataset)
        return step_sizes(length, self._least_rest, self._step_size, drop_last=self._drop_last)[0]

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        at = self._at
        self._samples = len(self.dataset)  # which may be another one in each epoch
        if at.consumed and at.data[0] != self._samples:
            raise MismatchError(
                f"{self.name}: the dataset has {self._samples} samples, and had {at.data[0]} when epoch {at.epoch} "
                "began, in the checkpoint or before its loop was left"
            )
        epoch_order = self._epoch_order()
        digest = epoch_order.digest if isinstance(epoch_order, SampledOrder) else None
        # Workers that stay are those of one iteration: one beside it, such as a look at a batch, has its own.
        collated = self._timed(self._source if len(self._open) == 1 else self._make_source())
        self._seed_workers()
        for step, parts in self._plan(epoch_order.length):
            self._draw(iteration)  # before the batch: reading it may draw random numbers
            given = [next(collated) for _ in parts]
            counts = [epoch_order.count(part) for part in parts]
            own = sum(counts) if own_samples(len(step), self._world_size, self._rank) else 0
            share = StepShare(epoch_order.count(step), own, self._context.count_pieces(len(step)))
            # Counted here, and not by the batch sampler: DataLoader's workers sample ahead of what has been yielded.
            yield self._give(given, counts, share, len(step), (self._samples, digest))
        for _ in collated:  # nothing: its workers end
            pass

    @property
    def mark(self) -> tuple[int, str] | None:
        return (self._trained.epoch, self._trained.data[1]) if self._drawn and self._trained.data else None

    def _state(self, at: Position) -> dict[str, Any]:
        samples, digest = at.data or (None, None)
        return {"samples": samples, "digest": digest} if self._drawn else {"samples": samples}

    def _data_of(self, state: Mapping[str, Any]) -> Any:
        # The length is compared where the rest of an epoch begins: a script may set it before each epoch.
        return None if state["samples"] is None else (state["samples"], state.get("digest"))

    def indices(self) -> Iterator[list[Any]]:
        """Yield the indices of each of this rank's micro-batches, of all steps that are left of the epoch."""
        epoch_order = self._epoch_order()
        return epoch_order.indices(part for _, parts in self._plan(epoch_order.length) for part in parts)

    def _epoch_order(self) -> order.EpochOrder | SampledOrder:
        at = self._at
        if not self._drawn:
            self._check_size("dataset", self._samples)
            return order.EpochOrder(self._order, self._samples, self._seed, at.epoch)
        drawn = self._drawn.of(at.epoch, self._seed, at.data[1] if at.data else None)
        self._check_size("sampler", drawn.length)
        return drawn

    def _check_size(self, what: str, length: int) -> None:
        context, drops = self._context, self._drop_last
        least = context.step_size if drops else 1 if context.evaluates or self._is_batched else context.world_size
        if length < least:
            unit = "a step of all ranks takes" if drops else "there are ranks"
            raise SetupError(f"{self.name}: the {what} has {length} samples, fewer than {unit} ({least})")

    def _plan(self, length: int) -> Iterator[tuple[range, list[range]]]:
        """Yield the positions of each step that is left of the epoch, and those of this rank's micro-batches in it."""
        position = self.consumed
        steps, last = step_sizes(length - position, self._least_rest, self._step_size, drop_last=self._drop_last)
        for step in range(steps):
            size = last if step == steps - 1 else self._step_size
            begin, end = rank_share(size, self._world_size, self._rank)
            pieces = pieces_of(end - begin, self._context.count_pieces(size))
            first = position + begin
            yield range(position, position + size), [range(first + part.start, first + part.stop) for part in pieces]
            position += size


def _drawn_orders(of_torch: dict[str, Any], context: LoaderContext, samples: int) -> DrawnOrders | None:
    """The orders of the sampler in the options for torch's DataLoader, which is taken out of them; None without one.

    Raises SetupError for two samplers, for a batch sampler beside options that make batches, and as `DrawnOrders`.
    """
    options = context.options
    sampler, batch_sampler = of_torch.pop("sampler", None), of_torch.pop("batch_sampler", None)
    if sampler is None and batch_sampler is None:
        return None
    name = "sampler" if batch_sampler is None else "batch_sampler"
    if options.shuffle or (batch_sampler is not None and (sampler is not None or options.drop_last)):
        raise SetupError(f"{name}= chooses the samples: leave out shuffle=, and drop_last= beside a batch_sampler")
    if batch_sampler is not None and options.batch_size is not None:
        raise SetupError("batch_sampler= makes the batches: leave out batch_size=")
    return DrawnOrders(
        sampler if batch_sampler is None else batch_sampler, context.name, batched=sampler is None, samples=samples
    )


class _BatchSampler:
    """DataLoader's batch sampler: the indices that are left of the loader's epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()
