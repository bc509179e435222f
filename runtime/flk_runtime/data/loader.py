"""EpochLoader: the interface of loaders, with an epoch, a position in it, and loops over the epochs or steps left.

A position is the number of samples of the epoch that all ranks together have consumed, so it means the same at any
number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from flk_runtime.contract.variable import is_count
from flk_runtime.data.micro_batches import MicroBatches, StepShare, count_pieces
from flk_runtime.errors import SetupError
from flk_runtime.system import pytree, rng

T = TypeVar("T")
Transform = Callable[[Any], Any]  # of a sample


@dataclass(frozen=True)
class LoaderOptions:
    """The options of `Run.loader`, which are the same on all ranks.

    - ``batch_size``: samples of a rank's micro-batch; None with ``batch_sampler=``, which makes them.
    - ``shuffle``: shuffle a map-style dataset anew in each epoch, which is the default. An iterable keeps its order.
    - ``split``: False declares that an iterable is already split over ranks and workers.
    - ``drop_last``: drop the samples at the end of an epoch that are too few for a step. By default the last step has
      fewer samples or a few more.
    - ``accumulate``: the loader collates so many micro-batches for a step, and gives them together, for
      `Run.micro_batches`. In an elastic job a step takes ``full_world_size * batch_size * accumulate`` samples, also
      with fewer ranks, unless the job scales its batch: then there are more micro-batches. By default a rank's samples
      of a step are one batch, which is as large as that takes.
    - ``transform``: a function of a sample of an iterable, which all workers call while one process reads. By default
      samples stay as they are.
    - ``seed``: of the order. Default: the seed of the run.
    - ``name``: under which checkpoints have the position. Default: by the order of calls.
    """

    batch_size: int | None
    shuffle: bool | None = None
    split: bool = True
    drop_last: bool = False
    accumulate: int | None = None
    seed: int | None = None
    name: str | None = None
    transform: Transform | None = None
    of_torch: Mapping[str, Any] = field(default_factory=dict)  # the options of torch's DataLoader

    def __post_init__(self) -> None:
        """Raises SetupError for sizes that are no whole numbers, and for options that a loader sets itself."""
        for name, what in (
            ("batch_size", "samples per rank and micro-batch"),
            ("accumulate", "micro-batches per step"),
        ):
            value = getattr(self, name)
            is_default = value is None and (name == "accumulate" or self.of_torch.get("batch_sampler") is not None)
            if not is_default and not is_count(value, 1):
                raise SetupError(f"{name}={value!r}: expected a whole number, 1 or more ({what})")
        if "generator" in self.of_torch:
            raise SetupError("generator= cannot be passed: pass seed=, of which the loader makes all random numbers")
        if not self.of_torch.get("in_order", True):
            raise SetupError("in_order=False: batches would come in any order, and a position could not be resumed")

    @property
    def rank_size(self) -> int:
        """Samples of a rank in a full step, where all ranks are there; batches, where ``batch_sampler=`` makes them."""
        return (self.batch_size or 1) * (self.accumulate or 1)


class LoaderEvents:
    """The calls of a loader to the run that it belongs to. Here they do nothing: the loader is alone."""

    def steps_done(self) -> int:
        """The optimizer steps of the run."""
        return 0

    def begin(self) -> None:
        """An iteration is about to give its first batch."""

    def give(self, loader: EpochLoader, share: StepShare) -> None:
        """The loader gives a batch, which is this rank's share of a step."""

    def leave(self, loader: EpochLoader) -> None:
        """An iteration was left before its end."""

    def end_epoch(self, loader: EpochLoader) -> None:
        """The loader has given the last batch of an epoch."""

    def end(self) -> None:
        """The last epoch or step of a loop has ended."""


@dataclass(frozen=True)
class LoaderContext:
    """The options of a loader, and the facts about a run and a rank that it needs."""

    options: LoaderOptions
    rank: int
    world_size: int
    device: torch.device
    seed: int
    name: str = "loader"
    events: LoaderEvents = field(default_factory=LoaderEvents)
    full_world_size: int = 0  # ranks whose batches together are a step, whatever the number of ranks is; 0: world_size
    evaluates: bool = False  # ranks may have no samples in a step

    @property
    def step_size(self) -> int:
        """Samples of a full step, over all ranks."""
        return self.options.rank_size * (self.full_world_size or self.world_size)

    def count_pieces(self, samples: int) -> int:
        """The number of micro-batches of a step of ``samples``; 1 where the loader gives batches."""
        options = self.options
        return 1 if options.accumulate is None else count_pieces(samples, self.world_size, options.batch_size or 1)


class EpochLoader:
    """A loader of one rank's batches, which can be resumed. Made by `Run.loader`.

    ``epoch`` counts from 0; ``consumed`` is the number of samples of this epoch that all ranks together have been
    given. Iterating yields the rest of the current epoch, then goes to the next epoch.
    """

    def __init__(self, context: LoaderContext) -> None:
        self.name = context.name
        self.epoch = 0
        self.consumed = 0
        self.waited = 0.0  # seconds in which the training loop has waited for batches of torch's DataLoader
        self.is_saved = False  # a checkpoint has the position
        # Whether a step has trained with it, at any time; None: the checkpoint is of a release that did not save this.
        self.is_trained: bool | None = False
        self._context, self._seed = context, context.seed  # a checkpoint brings its own seed
        self._rank, self._world_size, self._step_size = context.rank, context.world_size, context.step_size
        # DataLoader's own default draws the seed of its workers from the global generator.
        self._generator = torch.Generator()

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches()
        except GeneratorExit:
            self._context.events.leave(self)
            raise

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch, and go to the next one."""
        raise NotImplementedError

    def gather(self) -> None:
        """Hook: get what only other ranks know of the position, so that the state has it. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`; the seed is part of it, since it determines the order.

        Raises CheckpointError if the position is in other data.
        """
        raise NotImplementedError

    def _position(self) -> dict[str, Any]:
        """What the states of all loaders have."""
        position = {"seed": self._seed, "epoch": self.epoch, "consumed": self.consumed}
        return position if self.is_trained is None else {**position, "trained": self.is_trained}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        """Restore `_position`."""
        self._seed, self.epoch, self.consumed = state["seed"], state["epoch"], state["consumed"]
        self.is_trained = state.get("trained")

    def rewind(self) -> None:
        """Go to the beginning of epoch 0."""
        self._next_epoch()
        self.epoch = 0

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, from the current one on.

        If the caller breaks out of an epoch, that epoch is over. After the last one the run is saved.
        """
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                self._next_epoch()
        self._context.events.end()

    def steps(self, count: int) -> Iterator[Any]:
        """Yield the batches of the optimizer steps that are left of ``count``, over as many epochs as that takes.

        `Run.step` counts the steps. After the last one the run is saved.
        """
        while self._context.events.steps_done() < count:
            for batch in self:
                yield batch
                if self._context.events.steps_done() >= count:
                    break
        self._context.events.end()

    def _timed(self, source: Iterable[T]) -> Iterator[T]:
        """Yield the items of ``source``, and add to `waited` the time that they take."""
        items = iter(source)
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.waited += time.perf_counter() - began
            yield item

    def _begin(self) -> None:
        self._context.events.begin()
        self._generator.manual_seed(rng.derive_seed("workers", self._seed, self.epoch, self.consumed, self._rank))

    def _give(self, parts: list[Any], counts: Sequence[int], share: StepShare) -> Any:
        """What the loader gives next: micro-batches of so many samples, or the only one of ``parts``, on the device."""
        parts = to_device(parts, self._context.device)
        self._context.events.give(self, share)
        return parts[0] if self._context.options.accumulate is None else MicroBatches(parts, counts, share)

    def _next_epoch(self) -> None:
        self._context.events.end_epoch(self)
        self.epoch, self.consumed = self.epoch + 1, 0


class Collate:
    """Collates samples, and gives the number of those that are None beside the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return sum(each is None for each in samples), self._collate(samples)


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``. The batch is a pytree; other leaves stay as they are.

    An object with a method ``to`` (a PackedSequence, a tokenizer's BatchEncoding) is moved by it.
    """
    if device.type == "cpu":  # DataLoader makes batches on the CPU
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _can_move(leaf) else leaf

    return pytree.map_leaves(batch, move, _can_move)


def _can_move(value: Any) -> bool:
    return hasattr(value, "to")
