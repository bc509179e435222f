"""The global batch of an elastic job: who takes which samples of a step, in how many pieces, and with which weight."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from flk_runtime.data import IterableLoader, Loader, StepShare, parts_of
from flk_runtime.errors import SetupError
from tests.support.loaders import Shares, loader_context

WORLDS = st.integers(1, 8)
BATCHES = st.integers(1, 5)


def shares_of_an_epoch(
    samples: int, world_size: int, batch_size: int, full: int, consumed: int = 0
) -> list[list[tuple[list[tuple[list[int], float]], StepShare]]]:
    """[step][rank]: the micro-batches of a rank with their fractions, and its share."""
    ranks = []
    for rank in range(world_size):
        shares = Shares()
        context = loader_context(batch_size, rank, world_size, events=shares, full_world_size=full, accumulate=1)
        loader = Loader(TensorDataset(torch.arange(samples)), context)
        loader.load_state_dict(loader.state_dict() | {"consumed": consumed, "samples": samples})
        taken = [[(part.tolist(), fraction) for (part,), fraction in parts_of(batch)[1]] for batch in loader]
        ranks.append(list(zip(taken, shares.found, strict=True)))
    return [list(step) for step in zip(*ranks, strict=True)]


@given(data=st.data(), full=WORLDS, batch_size=BATCHES)
def test_a_step_has_as_many_samples_with_fewer_ranks_and_each_sample_is_taken_once(
    data: st.DataObject, full: int, batch_size: int
) -> None:
    world_size = data.draw(st.integers(1, full))
    samples = data.draw(st.integers(full, 100))
    steps = shares_of_an_epoch(samples, world_size, batch_size, full)
    every = [[part for taken, _ in step for part, fraction in taken if fraction] for step in steps]
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(every))) == list(range(samples))
    assert len(steps) == len(shares_of_an_epoch(samples, full, batch_size, full))
    for parts in every[:-1]:
        assert sum(map(len, parts)) == full * batch_size


@given(samples=st.integers(8, 60), consumed=st.integers(0, 60), world_size=WORLDS, batch_size=BATCHES)
def test_the_weights_of_a_step_make_the_mean_over_its_samples(
    samples: int, consumed: int, world_size: int, batch_size: int
) -> None:
    values = torch.rand(samples)
    for step in shares_of_an_epoch(samples, world_size, batch_size, 8, min(consumed, samples)):
        pieces = step[0][1].pieces
        total = 0.0
        for taken, share in step:
            assert share.pieces == pieces  # all ranks take as many micro-batches
            assert len(taken) == pieces
            for part, fraction in taken:
                assert len(part) <= batch_size
                total += share.weight(world_size, fraction) * values[part].mean().item() / world_size
        distinct = {i for taken, _ in step for part, _ in taken for i in part}
        assert total == pytest.approx(values[sorted(distinct)].mean().item())


def test_the_loader_collates_each_micro_batch_from_samples_of_its_own() -> None:
    """Time comes first, two views are concatenated, or samples are packed into a row: nothing of that can be split."""

    def pack(samples: list[torch.Tensor]) -> dict[str, Any]:
        both = torch.cat([torch.stack(samples), -torch.stack(samples)])
        time_first = torch.nn.utils.rnn.pad_sequence(samples)
        return {"views": both, "time": time_first, "row": torch.cat(samples)[None], "lengths": [*map(len, samples)]}

    for make in (Loader, IterableLoader):
        data: Any = [torch.full((3,), float(number)) for number in range(14)]
        shuffle = False if make is Loader else None
        options: dict[str, Any] = {"accumulate": 2, "shuffle": shuffle, "collate_fn": pack}
        loader = make(data, loader_context(3, **options))
        steps = [[part for part, _ in parts_of(batch)[1]] for batch in loader]
        assert [[part["row"][0, ::3].tolist() for part in parts] for parts in steps] == [
            [[0, 1, 2], [3, 4, 5]],
            [[6, 7, 8], [9, 10, 11]],
            [[12, 13]],
        ]
        for part in itertools.chain.from_iterable(steps):
            first, second = part["views"].chunk(2)
            assert torch.equal(first, -second)
            assert part["time"].shape == (3, len(part["lengths"]))


def test_a_batch_that_the_script_made_is_refused() -> None:
    for batch, kind in (
        (torch.ones(4), "Tensor"),
        ([torch.ones(4)], "list"),
        ({"x": 1}, "dict"),
        ((), "tuple"),
    ):
        with pytest.raises(SetupError, match=f"was given a {kind}.*: pass accumulate=1 or more to run.loader"):
            parts_of(batch)
    (plain, *_) = list(Loader(TensorDataset(torch.arange(8)), loader_context(2)))
    with pytest.raises(SetupError, match="pass accumulate=1"):
        parts_of(plain)


def test_an_iterable_keeps_its_global_batch_too() -> None:
    shares = Shares()
    stream = IterableLoader(_Numbers(20), loader_context(3, events=shares, full_world_size=2))
    assert [len(batch) for batch in stream] == [6, 6, 6, 2]
    assert shares.found == [StepShare(6, 6, 1)] * 3 + [StepShare(2, 2, 1)]
    divided = IterableLoader(_Numbers(20), loader_context(3, events=shares, full_world_size=2, accumulate=1))
    assert [[len(part) for part in batch.parts] for batch in divided] == [[3, 3], [3, 3], [3, 3], [2]]
    assert shares.found[4:] == [StepShare(6, 6, 2)] * 3 + [StepShare(2, 2, 1)]
    with pytest.raises(SetupError, match="accumulate=0: expected a whole number, 1 or more"):
        loader_context(3, accumulate=0)


class _Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))
