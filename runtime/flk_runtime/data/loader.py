"""EpochLoader: the interface of loaders, with an epoch, a position in it, and loops over the epochs or steps left.

A position is the number of samples of the epoch that all ranks together have consumed, so it means the same at any
number of ranks.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from flk_runtime.contract.variable import is_count
from flk_runtime.data import order
from flk_runtime.data.micro_batches import MicroBatches, StepShare, count_pieces
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.system import pytree, rng

T = TypeVar("T")
# What gives a loader each order.
_GIVEN = {
    order.OWN: "shuffle=False",
    order.SHUFFLED: "shuffle=True",
    order.SAMPLED: "a sampler",
    order.STREAM: "an iterable",
}


@dataclass(frozen=True)
class LoaderOptions:
    """The options of `Run.loader`, which are the same on all ranks.

    - ``batch_size``: samples of a rank's micro-batch; None with ``batch_sampler=``, which makes them.
    - ``shuffle``: shuffle a map-style dataset anew in each epoch, which is the default. An iterable keeps its order.
    - ``drop_last``: drop the samples at the end of an epoch that are too few for a step. By default the last step has
      fewer samples or a few more.
    - ``accumulate``: the loader collates so many micro-batches for a step, and gives them together, for
      `Run.micro_batches`. In an elastic job a step takes ``full_world_size * batch_size * accumulate`` samples, also
      with fewer ranks, unless the job scales its batch: then there are more micro-batches. By default a rank's samples
      of a step are one batch, which is as large as that takes.
    - ``seed``: of the order. By default the seed of the run decides it, and loaders have different orders.
    - ``name``: under which checkpoints have the position. Default: by the order of calls.
    """

    batch_size: int | None
    shuffle: bool | None = None
    drop_last: bool = False
    accumulate: int | None = None
    seed: int | None = None
    name: str | None = None
    of_torch: Mapping[str, Any] = field(default_factory=dict)  # the options of torch's DataLoader

    def __post_init__(self) -> None:
        """Raises SetupError for sizes that are no whole numbers, and for options that a loader sets itself."""
        of_torch = {name: value for name, value in self.of_torch.items() if value is not None}  # None is the default
        object.__setattr__(self, "of_torch", of_torch)
        for name, value in (
            ("batch_size", 1 if self.batch_size is None and "batch_sampler" in of_torch else self.batch_size),
            ("accumulate", 1 if self.accumulate is None else self.accumulate),
        ):
            if not is_count(value, 1):
                raise SetupError(f"{name}={value!r}: expected a whole number, 1 or more")
        if "generator" in of_torch:
            raise SetupError("generator= cannot be passed: pass seed=, of which the loader makes all random numbers")
        if not of_torch.get("in_order", True):
            raise SetupError("in_order=False: batches would come in any order, and a position could not be resumed")

    @property
    def rank_size(self) -> int:
        """Samples of a rank in a full step, where all ranks are there; batches, where ``batch_sampler=`` makes them."""
        return (self.batch_size or 1) * (self.accumulate or 1)


class LoaderEvents:
    """The calls of a loader to the run that it belongs to. Here they do nothing: the loader is alone."""

    counts_steps = False
    """Whether `EpochLoader.count_step` is called after each step."""
    is_counted = False
    """Whether the script loops over `EpochLoader.epochs` or `EpochLoader.steps`."""

    def steps_done(self) -> int:
        """The optimizer steps of the run."""
        return 0

    def begin_steps(self, count: int) -> None:
        """A loop until so many optimizer steps of the run begins."""

    def begin(self, loader: EpochLoader) -> None:
        """An iteration over the loader is about to give its first batch."""

    def draw(self, loader: EpochLoader, *, goes_on: bool) -> None:
        """A batch is about to be drawn; ``goes_on``: by the loop that trains, and so by all ranks.

        Any other may be a look of one rank.
        """

    def end_step(self) -> None:
        """A loop of all ranks over epochs goes on, which ends the step before."""

    def give(self, loader: EpochLoader, share: StepShare) -> None:
        """The loader gives a batch, which is this rank's share of a step."""

    def go_on(self, loader: EpochLoader) -> None:
        """A loop that may count epochs itself goes on in an epoch after the first, where a checkpoint was taken."""

    def leave(self, loader: EpochLoader, *, at_end: bool) -> None:
        """An iteration is over; ``at_end``: it has given the last batch of its epoch."""

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


class Position(NamedTuple):
    """A position in the data. It replaces none: each batch makes a new one."""

    epoch: int = 0
    consumed: int = 0  # samples of this epoch that all ranks together have been given
    data: Any = None  # what else belongs to it; None at the beginning of an epoch


@dataclass(eq=False)
class Iteration:
    at: Position  # after its latest batch, or where it begins
    begun: bool = False
    place: tuple[Any, ...] = ()  # where the script drew its first batch
    evaluates: bool = False  # begun without gradients, and not by a loop over steps
    counts: bool = False  # of a loop over steps


class EpochLoader:
    """A loader of one rank's batches, which can be resumed. Made by `Run.loader`.

    Each ``iter(loader)`` is an epoch, as of torch's DataLoader: if the one before was left, the rest of it is dropped.
    The first one after a restart is the rest of the epoch that was going on. One in which no step is trained, such as
    ``next(iter(loader))`` for a look at a batch, takes nothing from the epochs: the next one has the same order. So a
    single rank may look at a batch of data with an index. ``dataset`` is what the loader was made of, for all ranks.
    """

    _order = order.STREAM  # a position in one order is none in another

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        self.name, self.dataset = context.name, dataset
        self.waited = 0.0  # seconds in which the training loop has waited for batches of torch's DataLoader
        self.is_saved = False  # a checkpoint has the position
        self.is_trained = False  # a step has trained with it, at any time
        self.latest = StepShare(context.world_size, 1, 1)  # this rank's share of the step of the latest batch
        self._context, self._seed = context, int(context.seed)  # a checkpoint brings its own seed
        self._rank, self._world_size, self._step_size = context.rank, context.world_size, context.step_size
        # DataLoader's own default draws the seed of its workers from the global generator.
        self._generator = torch.Generator()
        self._at = Position()  # after the latest batch
        self._trained = Position()  # after the latest batch with which a step was trained
        self._start: Position | None = Position()  # of this attempt, until the first loop over epochs or steps
        self._is_resumed = False  # no step has been trained since the position was restored
        self._open: list[Iteration] = []  # iterations that have begun to give batches, and are not over
        self._latest: Iteration | None = None
        self._givers: list[Iteration] = []  # of the batches since the latest step
        self._trainer: Iteration | None = None  # gave the batch of the latest step
        self._places: set[tuple[Any, ...]] = set()  # where the script drew first batches of iterations that train
        self._others: set[Iteration] = set()  # gave one too

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._at.epoch

    @property
    def consumed(self) -> int:
        """The number of samples of this epoch that all ranks together have been given."""
        return self._at.consumed

    def __iter__(self) -> Iterator[Any]:
        events = self._context.events
        if self._is_resumed and self.is_trained and self._trained.epoch and not events.is_counted:
            events.go_on(self)
        return self._iterate(self._begin())

    def _begin(self, *, rest: bool = False) -> Iteration:
        """Begin an iteration: an epoch, or with ``rest`` what is left of the current one."""
        at, latest = self._saved if rest else self._trained, self._latest
        # An epoch in which something was trained is over for the next iteration, as in torch. One that a checkpoint has
        # brought is not: its rest is for the first iteration of this attempt.
        is_second = latest is not None and not latest.begun  # as in zip(loader, loader)
        if at.consumed and not rest and (is_second or not self._is_resumed):
            at = Position(at.epoch + 1)
        self._latest = Iteration(at, evaluates=not (rest or torch.is_grad_enabled()), counts=rest)
        self._settle()
        return self._latest

    def _settle(self) -> None:
        """Leave the position of an iteration that is over for that of the one after it."""
        if not self._open and self._latest and not self._latest.begun:
            self._at = self._trained = self._latest.at

    def _iterate(self, iteration: Iteration) -> Iterator[Any]:
        iteration.begun = True
        self._open.append(iteration)
        self._go(iteration.at)
        try:
            for batch in self._batches(iteration):
                iteration.at = self._at
                if not self._givers or self._givers[-1] is not iteration:
                    self._givers = [*(giver for giver in self._givers if giver in self._open), iteration]
                yield batch
                # While this generator waited, another iteration may have given a batch, and the position is its own.
                if self._at is not iteration.at:
                    self._go(iteration.at)
            self._end_epoch(iteration)
        except GeneratorExit:
            self._context.events.leave(self, at_end=False)
            raise
        finally:
            self._open.remove(iteration)
            self._settle()

    def _batches(self, iteration: Iteration) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch, each after `_draw`."""
        raise NotImplementedError

    def _draw(self, iteration: Iteration) -> None:
        """Tell the run that a batch is about to be drawn.

        An iteration that begins goes on with the training where the script draws from it where it has drawn from one
        that trains: the loop of the next epoch does. A look of one rank has another place in the script, and the other
        ranks would wait for it in vain.
        """
        goes_on = iteration is self._trainer
        if not iteration.place:
            iteration.place = tuple((frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(None))
            goes_on = iteration.place in self._places and self._trainer not in self._open
        self._context.events.draw(self, goes_on=goes_on)

    @property
    def is_in_loop(self) -> bool:
        """Whether the iteration that gave the batch of the latest step is not over."""
        return self._trainer in self._open

    def _go(self, at: Position) -> None:
        self._at = at

    def count_step(self) -> bool:
        """A step has been made with the latest batch, and the position that is saved comes after it.

        Of several iterations, the one that gave the batch of the step before has given this one too, and the others
        were looks at a batch; else it is the latest one that is not over. Returns whether one of the others has given a
        batch to the step before as well: then it trains too, and a checkpoint has one position.
        """
        givers, self._givers = self._givers, []
        if not givers:
            return False
        # Which iteration trains cannot be asked, since a look gives a batch, too. But a look is mostly left at once and
        # a loop goes on: so the trainer of the step before is preferred, then the latest one that is still open.
        opened = [giver for giver in givers if giver in self._open] or givers
        self._trainer = self._trainer if self._trainer in givers else opened[-1]
        self._places.add(self._trainer.place)
        at, self._is_resumed = self._trainer.at, False
        # An evaluation that was left is over, and begins anew after a restart too.
        self._trained = (
            Position(at.epoch + 1) if self._trainer.evaluates and at.consumed and not self.is_in_loop else at
        )
        others, self._others = self._others, {giver for giver in opened if giver is not self._trainer}
        return not others.isdisjoint(self._others)

    @property
    def mark(self) -> tuple[int, str] | None:
        """The epoch of the latest step, and what tells its order from others; None if all ranks compute one order."""
        return None

    def gather(self) -> None:
        """Hook: get what only other ranks know of the position, so that the state has it. Collective."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values: after the batch of the latest step, or where no step counts, the latest."""
        at = self._saved
        return {
            "seed": self._seed,
            "epoch": at.epoch,
            "consumed": at.consumed,
            "order": self._order,
            "trained": self.is_trained,
            **self._state(at),
        }

    @property
    def _saved(self) -> Position:
        return self._trained if self._context.events.counts_steps else self._at

    def _state(self, at: Position) -> dict[str, Any]:
        """The entries of a position's state that only this kind of loader has."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position from `state_dict`; the seed is part of it, since it determines the order.

        Raises CheckpointError if the position is in other data.
        """
        if state["order"] != self._order:
            raise MismatchError(
                f"{self.name}: the order here is that of {_GIVEN[self._order]}, and in the checkpoint that of "
                f"{_GIVEN.get(state['order'], 'something else')}: resume with the same data, shuffle= and sampler=, or "
                "give the loader another name="
            )
        self._seed, self.is_trained, self._is_resumed = state["seed"], state["trained"], True
        self._at = self._trained = self._start = Position(state["epoch"], state["consumed"], self._data_of(state))

    def _data_of(self, state: Mapping[str, Any]) -> Any:
        """The data of the position in a state. Raises CheckpointError if they are of other data."""
        raise NotImplementedError

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of ``count``, from the current one on.

        If the caller breaks out of an epoch, that epoch is over. After the last one the run is saved.
        """
        self._count()
        while (epoch := self._trained.epoch) < count:
            yield epoch
            self._at = self._trained = Position(epoch + 1)
            self._latest = None
        self._context.events.end()

    def steps(self, count: int) -> Iterator[Any]:
        """Yield the batches of the optimizer steps that are left of ``count``, over as many epochs as that takes.

        `Run.step` counts the steps. After the last one the run is saved. A later loop goes on in the same epoch.
        """
        events = self._context.events
        self._count()
        events.begin_steps(count)
        while events.steps_done() < count:
            for batch in self._iterate(self._begin(rest=True)):
                yield batch
                if events.steps_done() >= count:
                    break
            events.end_step()
        events.end()

    def _count(self) -> None:
        """Begin a loop over epochs or steps: iterations before it in which no step was trained take nothing from it."""
        self._context.events.is_counted = True
        if self._start and not self._trainer:
            self._at, self._trained, self._is_resumed = self._start, self._start, True
        self._start = None

    def _timed(self, source: Iterable[T]) -> Iterator[T]:
        """Yield the items of ``source``, and add to `waited` the time that they take."""
        with torch.device("cpu"):  # DataLoader draws its seed on the default device, by a generator of the CPU
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

    def _seed_workers(self) -> None:
        self._context.events.begin(self)
        at = self._at
        self._generator.manual_seed(rng.derive_seed("workers", self._seed, at.epoch, at.consumed, self._rank))

    def _give(self, parts: list[Any], counts: Sequence[int], share: StepShare, positions: int, data: Any) -> Any:
        """Move on, and return what the loader gives next, on the device: the only one of ``parts``, or micro-batches.

        ``counts`` are the numbers of samples of the parts. The position moves by ``positions``, and has ``data`` then.
        """
        self._at, self.latest = Position(self._at.epoch, self._at.consumed + positions, data), share
        parts = to_device(parts, self._context.device)
        self._context.events.give(self, share)
        return parts[0] if self._context.options.accumulate is None else MicroBatches(parts, counts, share)

    def _end_epoch(self, iteration: Iteration) -> None:
        """Go to the beginning of the next epoch, unless another iteration trains or this one takes nothing."""
        self._context.events.leave(self, at_end=True)
        self._at = iteration.at = Position(self._at.epoch + 1)  # where a step that comes after it goes on
        # Beside a loop over epochs or steps, an iteration in which no step was trained takes nothing.
        if iteration is self._trainer or (len(self._open) == 1 and (self._start or iteration.counts)):
            self._trained, self._givers, self._is_resumed = self._at, [], False


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``. The batch is a pytree; other leaves stay as they are.

    An object with a method ``to`` (a PackedSequence, a tokenizer's BatchEncoding) is moved by it.
    """
    if device.type == "cpu":  # DataLoader makes batches on the CPU
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            # From pinned memory, since the copy would wait for all kernels otherwise. Workers have pinned theirs. MPS
            # would read memory that is free meanwhile (pytorch issue 189690).
            return (leaf.pin_memory() if leaf.is_cpu and device.type == "cuda" else leaf).to(
                device, non_blocking=device.type == "cuda"
            )
        return leaf.to(device) if _can_move(leaf) else leaf

    return pytree.map_leaves(batch, move, _can_move)


def _can_move(value: Any) -> bool:
    return hasattr(value, "to")
