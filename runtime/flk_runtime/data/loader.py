"""The loader: each rank its share of every step, resumable at any number of ranks.

The order of an epoch depends on (seed, epoch) only, and a position in it is the number of samples that all ranks
together have consumed. So what is left after an interruption can be split anew over however many ranks there are then.
The arithmetic is in pure functions; the loading itself is torch's DataLoader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from flk_runtime.data.partition import DataShard, shard_range
from flk_runtime.errors import CheckpointError, SetupError
from flk_runtime.system import rng as randomness


def step_sizes(samples: int, world_size: int, batch_size: int, *, drop_last: bool) -> tuple[int, int]:
    """How ``samples`` that are left of an epoch are cut into steps: their number, and the samples in the last one.

    All others take ``world_size × batch_size``. A rest that can give every rank at least one sample is a step of its
    own; a smaller one joins the last full step; where there is none (only after a resume at a larger world size, see
    `rank_share`) it is a step nevertheless. ``drop_last`` drops the rest.
    """
    whole = world_size * batch_size
    steps, rest = divmod(samples, whole)
    if rest == 0 or drop_last:
        return steps, whole if steps else 0
    if rest >= world_size or steps == 0:
        return steps + 1, rest
    return steps, whole + rest


def rank_share(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """The part [begin, end) of a step of ``size`` samples that a rank takes: even, in order, the first ranks one more.

    Every rank needs a sample to compute a gradient from. Fewer samples than ranks can only be what an epoch had left
    when it was resumed with more ranks; each sample then goes to several ranks, and counts once for the position.
    """
    if size < world_size:
        begin = rank * size // world_size
        return begin, begin + 1
    part = shard_range(size, rank, world_size)
    return part.start, part.stop


def epoch_order(samples: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """The indices of an epoch in the order of all ranks together: int64, shape (samples,)."""
    if not shuffle:
        return torch.arange(samples)
    return torch.randperm(
        samples, generator=torch.Generator().manual_seed(randomness.derive_seed("order", seed, epoch))
    )


@dataclass(frozen=True)
class LoaderContext:
    """What a loader has to know of its run and of this rank's part in it."""

    batch_size: int  # samples per rank and step
    rank: int
    world_size: int
    device: torch.device
    seed: int
    name: str = "loader"
    steps_done: Callable[[], int] = lambda: 0
    on_begin: Callable[[], None] = lambda: None
    on_batch: Callable[[EpochLoader, int], None] = lambda loader, samples: None
    on_end: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise SetupError(
                f"batch_size={self.batch_size!r}: expected a whole number from 1 on (samples per rank and step)"
            )


class EpochLoader:
    """What all loaders have: an epoch, a position in it, and loops over what is left.

    ``epoch`` counts from 0; ``consumed`` counts the samples of this epoch that all ranks together have been given.
    Iterating runs what is left of the current epoch, then the epoch is advanced.
    """

    def __init__(self, feed: LoaderContext) -> None:
        self.name = feed.name
        self.epoch = 0
        self.consumed = 0
        self._feed, self._seed = feed, feed.seed  # a snapshot brings its own seed
        self._rank, self._world_size, self._batch_size = feed.rank, feed.world_size, feed.batch_size
        self._generator = torch.Generator()  # DataLoader else takes its workers' seed from the global generator

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. The seed comes with it, or samples would be dropped and doubled."""
        raise NotImplementedError

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left of ``count``, beginning with the one that was interrupted.

        An epoch that the caller breaks out of is over. After the last one the state of the training is saved.
        """
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._next_epoch()
        self._feed.on_end()

    def steps(self, count: int) -> Iterator[Any]:
        """The batches of those optimizer steps that are left of ``count``, over as many epochs as that takes.

        `Run.step` does the counting. After the last one the state of the training is saved.
        """
        while self._feed.steps_done() < count:
            for batch in self:
                yield batch
                if self._feed.steps_done() >= count:
                    break
        self._feed.on_end()

    def _begin(self) -> None:
        self._feed.on_begin()
        self._generator.manual_seed(
            randomness.derive_seed("workers", self._seed, self.epoch, self.consumed, self._rank)
        )

    def _next_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what a loader decides itself: SetupError."""
    refused = sorted({"batch_sampler", "sampler", "generator"} & options.keys())
    if refused:
        raise SetupError(f"the loader chooses its samples itself and takes no {refused[0]}")
    if not options.get("in_order", True):
        raise SetupError("in_order=False: batches would come in any order, and a position could not be resumed")


class Loader(EpochLoader):
    """Batches of this rank's share of a map-style dataset, as tensors on the run's device. Made by `Run.loader`."""

    def __init__(
        self, dataset: Any, feed: LoaderContext, *, shuffle: bool = True, drop_last: bool = False, **options: Any
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, Mapping):
            raise SetupError(f"{type(dataset).__name__} has no length and index: a loader needs a map-style dataset")
        if isinstance(dataset, DataShard):
            raise SetupError(
                "the data is already a shard of one rank: give the loader the whole data, and it splits it"
            )
        check_options(options)
        super().__init__(feed)
        self._shuffle, self._drop_last = shuffle, drop_last
        self._samples = len(dataset)
        least = feed.world_size * (feed.batch_size if drop_last else 1)
        if self._samples < least:
            unit = "a step of all ranks takes" if drop_last else "there are ranks"
            raise SetupError(f"{feed.name}: the dataset has {self._samples} samples, fewer than {unit} ({least})")
        self._source: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Batches(self),
            generator=self._generator,
            **{"pin_memory": feed.device.type == "cuda", **options},
        )

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank."""
        return step_sizes(self._samples, self._world_size, self._batch_size, drop_last=self._drop_last)[0]

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        for size, batch in zip(self._sizes(), self._source, strict=True):
            # Counted here and not where indices are drawn: workers draw them ahead of what has been handed out.
            self.consumed += size
            self._feed.on_batch(self, size)
            yield to_device(batch, self._feed.device)
        self._next_epoch()

    def state_dict(self) -> dict[str, int]:
        """The position, independent of the number of ranks."""
        return {"seed": self._seed, "epoch": self.epoch, "consumed": self.consumed, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a position. The seed comes with it, or samples would be dropped and doubled."""
        if state["samples"] != self._samples:
            raise CheckpointError(
                f"{self.name}: the dataset has {self._samples} samples, and had {state['samples']} in the snapshot"
            )
        self._seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]

    def indices(self) -> Iterator[list[int]]:
        """This rank's indices for every step that is left of the epoch."""
        order = epoch_order(self._samples, self._seed, self.epoch, shuffle=self._shuffle)
        position = self.consumed
        for size in self._sizes():
            begin, end = rank_share(size, self._world_size, self._rank)
            yield order[position + begin : position + end].tolist()
            position += size

    def _sizes(self) -> Iterator[int]:
        left = self._samples - self.consumed
        steps, last = step_sizes(left, self._world_size, self._batch_size, drop_last=self._drop_last)
        for step in range(steps):
            yield last if step == steps - 1 else self._world_size * self._batch_size


class _Batches:
    """The batch sampler that DataLoader asks: whatever is left of the loader's epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices()

    def __len__(self) -> int:
        return len(self._loader)


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors, at any depth of lists, tuples and dictionaries, on ``device``."""
    if device.type == "cpu":  # where every batch comes into being
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # packed sequences, and the batches of tokenizers
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
