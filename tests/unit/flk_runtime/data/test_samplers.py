"""Samplers of the script: each rank takes its share of one order, which a restart draws again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

from flk_runtime.data import Loader, samplers
from flk_runtime.errors import MismatchError, SetupError
from flk_runtime.system.rng import seed_all
from tests.support.loaders import Counted, Shares, loader_context

DATA = TensorDataset(torch.arange(40))


class Buckets:
    """Batches of neighbours in an order of its own generator, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = random.Random(1)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(begin, begin + size)) for begin, size in ((0, 3), (3, 7), (10, 10), (20, 5), (25, 15))]
        self.generator.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 5


MAKE: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 20 + [9.0] * 20, 30), "batch_size": 4},
    "own generator": lambda: {
        "sampler": RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
        "batch_size": 4,
    },
    "a list": lambda: {"sampler": [3, 1, 2, 3, 5, 7, 8, 9, 10, 11], "batch_size": 2},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=False)},
    "buckets": lambda: {"batch_sampler": Buckets()},
}


def loader(kind: str, rank: int, world_size: int, **more: Any) -> Loader:
    options = MAKE[kind]() | more
    return Loader(DATA, loader_context(options.pop("batch_size", None), rank, world_size, **options))


def taken(kind: str, world_size: int, state: Any = None, steps: int = 100, epochs: int = 1) -> tuple[list[Any], Any]:
    """[step][rank] of the samples, and the state after them."""
    ranks = []
    for rank in range(world_size):
        seed_all(rank)  # each rank has other random numbers
        shares = Shares()
        one = loader(kind, rank, world_size, events=shares)
        if state:
            one.load_state_dict(state)
        batches = itertools.chain.from_iterable(iter(one) for _ in range(epochs))
        seen = [batch[0].tolist() for _, batch in zip(range(steps), batches, strict=False)]
        assert all(share.own in (0, len(batch)) for share, batch in zip(shares.found, seen, strict=True))
        ranks.append([batch if share.own else [] for share, batch in zip(shares.found, seen, strict=True)])
        assert len({share.samples for share in shares.found[:1]}) == 1
    return [list(step) for step in zip(*ranks, strict=True)], one.state_dict()


def flat(steps: list[Any]) -> list[int]:
    return sorted(number for step in steps for batch in step for number in batch)


@pytest.mark.parametrize("kind", MAKE)
def test_ranks_take_shares_of_one_order_at_any_number_of_ranks_and_after_a_restart(kind: str) -> None:
    alone, _ = taken(kind, 1)
    assert flat(taken(kind, 2)[0]) == flat(alone)
    both, _ = taken(kind, 2, epochs=2)
    assert flat(both[: len(both) // 2]) != flat(both) or kind == "a list"
    begun, state = taken(kind, 2, steps=len(both) // 2 + 1, epochs=2)  # one step of the second epoch
    assert state["epoch"] == 1
    for world_size in (1, 2, 3):
        rest, _ = taken(kind, world_size, state)
        assert flat(begun + rest) == flat(both)
    rest, _ = taken(kind, 2, state)
    assert begun + rest == both


def test_a_batch_of_a_sampler_is_a_micro_batch_and_stays_whole() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [6, 7], [8], [9, 10], [11]]
    shares = Shares()
    context = loader_context(None, 0, 2, events=shares, batch_sampler=batches, accumulate=2)
    steps = [[part.tolist() for (part,) in batch.parts] for batch in Loader(DATA, context)]
    assert steps == [[[0, 1, 2], [3]], [[8], [9, 10]]]
    assert [(share.samples, share.own, share.pieces) for share in shares.found] == [(8, 4, 2), (4, 3, 2)]
    assert [len(batch[0]) for batch in Loader(DATA, loader_context(None, batch_sampler=batches))] == [
        *map(len, batches)
    ]
    same = [0]  # filled again for each batch
    assert [
        batch.tolist() for (batch,) in Loader(DATA, loader_context(None, batch_sampler=(same for same[0] in range(3))))
    ] == [[0], [1], [2]]


def test_samplers_that_would_lose_samples_are_refused() -> None:
    split = DistributedSampler(DATA, 2, 0)
    for options in ({"sampler": split}, {"batch_sampler": BatchSampler(split, 4, drop_last=False)}):
        with pytest.raises(SetupError, match="Sampler splits the data over the ranks, and the loader splits it"):
            Loader(DATA, loader_context(4 if "sampler" in options else None, 0, 2, **options))
    one = loader("own generator", 0, 1)
    next(iter(one))
    other = Loader(DATA, loader_context(4, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(4))))
    other.load_state_dict(one.state_dict())
    with pytest.raises(SetupError, match="the RandomSampler gives another order in epoch 0 than before the restart"):
        list(other)
    marks = []
    for seed in (3, 4):
        own = RandomSampler(DATA, generator=torch.Generator().manual_seed(seed))
        one = Loader(DATA, loader_context(4, 0, 2, events=Counted(), sampler=own))
        for _ in one:
            one.count_step()
        next(iter(one))
        one.count_step()
        marks.append({one.name: one.mark})
    with pytest.raises(SetupError, match="the sampler gives ranks different orders in epoch 1"):
        samplers.compare([{}, *marks])
    samplers.compare([{}, marks[0], {"loader": None}, marks[0], {"loader": (0, "other")}])  # looks are no steps
    plain = Loader(DATA, loader_context(4))
    for before, now, text in (
        (one, plain, "in the checkpoint that of a sampler"),
        (plain, one, "here is that of a sampler"),
    ):
        with pytest.raises(MismatchError, match=text):
            now.load_state_dict(before.state_dict())


def test_a_sampler_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(40))

    with pytest.raises(SetupError, match="the Endless has given more than 1048736 entries in an epoch, as one without"):
        next(iter(Loader(DATA, loader_context(4, sampler=Endless()))))
    monkeypatch.setattr(samplers, "_FEW", 0)
    with pytest.raises(SetupError, match="has given more than 160 entries in an epoch"):
        next(iter(Loader(DATA, loader_context(4, sampler=itertools.chain(range(40), Endless())))))
    many = Loader(DATA, loader_context(4, sampler=list(range(40)) * 9))
    assert len(list(many)) == 90


def test_options_that_contradict_a_sampler_are_refused() -> None:
    for size, options, text in (
        (4, {"sampler": [1], "shuffle": True}, "sampler= chooses the samples: leave out shuffle="),
        (None, {"batch_sampler": [[1]], "sampler": [1]}, "batch_sampler= chooses the samples"),
        (None, {"batch_sampler": [[1]], "drop_last": True}, "drop_last= beside a batch_sampler"),
        (4, {"batch_sampler": [[1]]}, "batch_sampler= makes the batches: leave out batch_size="),
        (None, {}, "batch_size=None: expected a whole number"),
    ):
        with pytest.raises(SetupError, match=text):
            Loader(DATA, loader_context(size, **options))
    with pytest.raises(SetupError, match="the sampler has 1 samples, fewer than there are ranks"):
        next(iter(Loader(DATA, loader_context(1, 0, 2, sampler=[1]))))
