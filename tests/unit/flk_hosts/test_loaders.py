"""Loaders that go on at their place in the data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
from torch.utils.data import DataLoader, Sampler

from flk_hosts.loaders import make_resumable
from flk_runtime.errors import MismatchError


def resumable(samples: int, batch: int) -> Any:
    loader: Any = DataLoader(list(range(samples)), batch)  # type: ignore[arg-type]
    make_resumable(loader)
    return loader


@pytest.mark.parametrize(("samples", "batch"), [(8, 4), (10, 2)])
def test_a_place_among_other_batches_is_refused_by_name(samples: int, batch: int) -> None:
    loader = resumable(8, 2)
    batches = iter(loader)
    next(batches)
    same = resumable(8, 2)
    same.load_state_dict(loader.state_dict())
    assert [each.tolist() for each in same] == [[2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        MismatchError, match=f"of 8 samples in batches of 2, and now there are {samples} in batches of {batch}"
    ):
        resumable(samples, batch).load_state_dict(loader.state_dict())


def test_between_two_epochs_the_batches_may_change() -> None:
    other = resumable(10, 5)
    other.load_state_dict({**resumable(8, 2).state_dict(), "began": None})
    assert len(list(other)) == 2


class Shuffles(Sampler[int]):
    """An order that goes on over epochs."""

    def __init__(self, generator: Any) -> None:
        self.generator_of_mine = generator

    def __iter__(self) -> Iterator[int]:
        order = list(range(8))
        self.generator_of_mine.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 8


def drawing(kind: str) -> Any:
    generator: Any = random.Random(1) if kind == "python" else numpy.random.RandomState(1)
    if kind == "numpy":
        generator = numpy.random.Generator(numpy.random.MT19937(3))
    loader: Any = DataLoader(list(range(8)), 2, sampler=Shuffles(generator))  # type: ignore[arg-type]
    make_resumable(loader, read_ahead=lambda: 1 if kind == "ahead" else 0)
    return loader


@pytest.mark.parametrize("kind", ["python", "numpy", "ahead"])
@pytest.mark.parametrize("given", [1, 3, 4, 6])
def test_generators_that_samplers_hold_go_on(kind: str, given: int) -> None:
    whole = drawing(kind)
    expected = [batch.tolist() for _ in range(3) for batch in whole]
    loader = drawing(kind)
    batches = itertools.chain.from_iterable(loader for _ in range(3))
    got = [next(batches).tolist() for _ in range(given)]
    if kind == "ahead":  # one batch that is read and not used
        got.pop()
    position = loader.state_dict()
    if given == 4:  # the loop over the epoch has ended
        position |= {"given": 0, "began": None}
        got = expected[:4] if kind == "ahead" else got
    resumed = drawing(kind)
    resumed.load_state_dict(position)
    got += [batch.tolist() for _ in range(3) for batch in resumed]
    assert got[: len(expected)] == expected


class Narrow:
    """A loader that keeps its own position, has none before it is read, and no attribute besides."""

    __slots__ = ("place", "start")
    place: int

    def __iter__(self) -> Iterator[int]:
        start, self.start = getattr(self, "start", 0), 0
        for number in range(start + 1, 5):
            self.place = number
            yield number

    def state_dict(self) -> Any:
        return self.place

    def load_state_dict(self, place: Any) -> None:
        self.start = place


@dataclass(frozen=True)
class Wrapped:
    """It has its position from what it wraps."""

    lines: Narrow = field(default_factory=Narrow)

    def __iter__(self) -> Iterator[int]:
        return iter(self.lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lines, name)


@pytest.mark.parametrize(("given", "ahead"), [(3, 0), (3, 1), (3, 2), (5, 0), (5, 1), (7, 2)])
@pytest.mark.parametrize("kind", [Narrow, Wrapped])
def test_a_loader_with_its_own_position_gives_again_what_was_read_ahead(kind: Any, given: int, ahead: int) -> None:
    loader, resumed = kind(), kind()
    make_resumable(loader, read_ahead=lambda: ahead)
    batches = itertools.chain.from_iterable(loader for _ in range(2))
    used = list(itertools.islice(batches, given))[: given - ahead]
    resumed.load_state_dict(loader.state_dict())
    began = [1] if (given, ahead) == (5, 1) else []  # a generator has no state before its first batch
    assert [*used, *began, *resumed] == [1, 2, 3, 4, 1, 2, 3, 4][: 4 if given < 5 else 8]


@pytest.mark.parametrize("fetched", [2, 3])
def test_a_loader_that_has_ended_gave_none_of_what_was_read_ahead(fetched: int) -> None:
    loader: Any = DataLoader(list(range(4)), 2)  # type: ignore[arg-type]
    counts = iter([0, 1, 2, fetched])  # another loader, which is longer, gives the rest
    make_resumable(loader, read_ahead=lambda: 1, fetched=lambda: next(counts))
    assert len(list(loader)) == 2
    assert loader.state_dict()["given"] == fetched - 1
