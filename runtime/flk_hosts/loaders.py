"""make_resumable(): have a loader continue after the batches that were used, also in the middle of an epoch."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from flk_hosts.generators import generators_of, give, state_of
from flk_runtime.checkpoint.stateful import stateful_of
from flk_runtime.data import length_of
from flk_runtime.errors import MismatchError
from flk_runtime.system import rng


def make_resumable(
    loader: Any,
    *,
    read_ahead: Callable[[], int] = lambda: 0,
    fetched: Callable[[], int] | None = None,
    resumed: Callable[[bool], None] = lambda exhausted: None,
) -> None:
    """Give ``loader``, a DataLoader, a position: a ``state_dict`` and a ``load_state_dict``.

    An epoch that is resumed has the same order as before, and leaves out the batches that were used. Of a dataset of
    map style they are not read. ``read_ahead`` returns how many of the batches that the script has fetched are not used
    yet, two at most. They are read again, with the random numbers of their first reading. ``fetched`` returns how many
    it has fetched in this epoch, if that is not how many the loader has given: others may give more. When ``resumed``
    is called, the script has the batches that it had when it was saved, and restores the random states. Its argument
    says whether none was left. Generators that samplers hold in attributes are restored too.

    A loader that has a position keeps it. Its state becomes the one before the batches that are not used yet.
    """
    if hasattr(loader, "flk_batches"):
        return
    kind, batches = type(loader), _Batches(read_ahead, fetched)
    if stateful_of(loader) is loader:
        _rewind(loader, batches)
    else:
        loader.__class__ = type(kind.__name__, (_Resumable, kind), {})
        loader.flk_batches, loader.flk_resumed = batches, resumed


class _Batches:
    """The latest batches of a loader, of which a script may fetch some before it uses them."""

    def __init__(self, read_ahead: Callable[[], int], fetched: Callable[[], int] | None) -> None:
        self.given = 0
        """How many the loader has given; of one without a position of its own, in this epoch."""
        self.before = collections.deque[tuple[int, Any]](maxlen=3)
        """How many batches the script had fetched before each of the latest ones, and the state then."""
        self._read_ahead, self._fetched = read_ahead, fetched or (lambda: self.given)

    @property
    def unused(self) -> list[Any]:
        """The states before the batches of this loader that are not used yet. One that had ended gave none of them."""
        used = self._fetched() - self._read_ahead()
        return list({number: state for number, state in self.before if number >= used}.values())

    def note(self, state: Any) -> None:
        """Note the state before the next batch is read."""
        self.before.append((self._fetched(), state))

    def counted(self, batches: Iterator[Any], state: Callable[[], Any]) -> Iterator[Any]:
        """The batches; notes the state before each of them."""
        while True:
            self.note(state())
            try:
                batch = next(batches)
            except StopIteration:
                self.before.pop()
                return
            self.given += 1
            yield batch


def _rewind(loader: Any, batches: _Batches) -> None:
    """Have a loader with a position of its own return the state before the batches that are not used yet.

    It may be any object: one with slots, one that is frozen, or one that has its methods from what it wraps.
    """
    own_state = loader.state_dict

    class Rewound(type(loader)):  # type: ignore[misc]
        __slots__ = ()
        flk_batches = batches

        def state_dict(self) -> Any:
            known = [state for state in batches.unused if state is not None]
            return known[0] if known else own_state()

        def __iter__(self) -> Iterator[Any]:
            iterator = super().__iter__()
            # A generator has not begun: the state is still that of the end. Before all batches there may be none.
            late = isinstance(iterator, GeneratorType) or not batches.given
            batches.before.clear()
            return batches.counted(
                iterator, lambda: None if late and not batches.before else copy.deepcopy(own_state())
            )

    Rewound.__name__ = type(loader).__name__
    object.__dict__["__class__"].__set__(loader, Rewound)  # which the class of a frozen loader refuses


class _Resumable(DataLoader):  # type: ignore[type-arg]
    """What the class of a loader gets in front of it. Its attributes begin with flk_, since the class is another's."""

    flk_batches: _Batches
    flk_resumed: Callable[[bool], None]
    flk_began: Any = None  # the random states at the beginning of this epoch
    flk_position: Any = None  # where the next epoch begins; None: at its beginning
    flk_first: Any = None  # the random states when its first batch was asked for
    flk_drawn: Any = None  # the random states when its sampler began to draw, which workers ask sooner
    flk_place: tuple[int, Any, Any] = (0, None, None)
    """The batches that the sampler of the next epoch leaves out, the states to read the next one with, and the random
    states to draw the order with."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        if self.flk_position is not None:  # which is not used yet
            return dict(self.flk_position)
        unused = self.flk_batches.unused
        before, second = (*unused, None, None)[:2]
        place = {"given": self.flk_batches.given - len(unused), "before": before, "second": second}
        workers_stay = self.persistent_workers and self._iterator is not None
        states = {"began": self.flk_began, "first": self.flk_first, "drawn": self.flk_drawn}
        return {**states, **place, **_sizes(self), "workers_stay": workers_stay, "own": _states(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the loader this position, at which its next epoch begins.

        Raises CheckpointError if it is within an epoch whose batches were others.
        """
        own, saved = _sizes(self), {name: state.get(name) for name in _sizes(self)}
        if state["began"] is not None and own != saved:
            raise MismatchError(
                f"the checkpoint is within an epoch of {saved['samples']} samples in batches of {saved['batch']}, and "
                f"now there are {own['samples']} in batches of {own['batch']}, among which the loader would not find "
                "its place: resume with the same data and batch size"
            )
        self.flk_position = state

    def __iter__(self) -> Any:
        position = self.flk_position
        self.flk_batches.given = 0
        self.flk_batches.before.clear()
        if position is not None and position["began"] is not None:
            return self._flk_counted(self._flk_rest(position))
        if position is not None:
            give(_things(self), position["own"])
        self.flk_position = None
        self.flk_began = {"global": rng.get_state(), "own": _states(self)}
        if position is not None and position["workers_stay"]:  # new ones draw a seed before the sampler draws
            self.flk_place = (0, None, rng.get_state())
        return self._flk_counted(super().__iter__())

    def _flk_rest(self, position: dict[str, Any]) -> Iterator[Any]:
        """The batches of an epoch that is resumed. It begins with the first: samplers may be told the epoch before."""
        given, before = position["given"], position["before"]
        is_map = self._dataset_kind == _DatasetKind.Map
        self.flk_position, self.flk_place = None, (given if is_map else 0, before, position["drawn"])
        rng.set_state(position["began"]["global"])
        give(_things(self), position["began"]["own"])
        batches = super().__iter__()
        if position["first"] is not None:
            rng.set_state(position["first"])
        if not (is_map and given):
            for _ in range(given):
                next(batches, None)
            self.flk_arrive(before)
        first = next(batches, None)
        self.flk_batches.given, self.flk_began, self.flk_first = given, position["began"], position["first"]
        self.flk_batches.note(before)
        if before is not None or first is None:
            self.flk_resumed(first is None)
        if first is not None:
            yield first
            if position["second"] is not None:  # it was read later, and not with the states that follow the first
                rng.set_state(position["second"])
                self.flk_batches.note(position["second"])
            yield from batches

    def flk_arrive(self, before: Any) -> None:
        """Set the random states with which the first batch is read: it may have been read before."""
        if before is None:
            self.flk_resumed(False)
        else:
            rng.set_state(before)

    def _flk_counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.flk_first = rng.get_state()
        yield from self.flk_batches.counted(batches, rng.get_state)

    @property
    def _index_sampler(self) -> Any:
        return _Rest(self, super()._index_sampler)


class _Rest:
    """The sampler of a loader without what its next epoch leaves out."""

    def __init__(self, loader: _Resumable, sampler: Any) -> None:
        self._loader, self._sampler = loader, sampler

    def __iter__(self) -> Iterator[Any]:
        (left_out, before, drawn), self._loader.flk_place = self._loader.flk_place, (0, None, None)
        if drawn is not None:  # workers that stay have drawn no seed in this epoch
            rng.set_state(drawn)
        self._loader.flk_drawn = rng.get_state()
        rest = iter(self._sampler)
        for _ in range(left_out):
            next(rest, None)
        if left_out:
            self._loader.flk_arrive(before)
        yield from rest

    def __len__(self) -> int:
        return len(self._sampler)


def _sizes(loader: Any) -> dict[str, int | None]:
    """The number of samples, if it is known, and the size of a batch."""
    size = loader.batch_size
    return {
        "samples": length_of(loader.dataset),
        "batch": getattr(loader.batch_sampler, "batch_size", None) if size is None else size,
    }


def _things(loader: Any) -> dict[str, Any]:
    """The parts of a loader that draw the order, and may hold random generators."""
    drawing = {name: getattr(loader, name, None) for name in ("generator", "sampler", "batch_sampler")}
    return {name: thing for name, thing in drawing.items() if thing is not None}


def _states(loader: Any) -> dict[str, Any]:
    return {path: state_of(generator) for path, generator in generators_of(_things(loader)).items()}
