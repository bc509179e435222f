"""The global batch of an elastic job: who takes which samples of a step, in how many pieces, and with which weight."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from flk_runtime.data import IterableLoader, Loader, StepShare, split
from flk_runtime.data.micro_batches import count_pieces
from flk_runtime.errors import SetupError
from tests.support.loaders import Shares, loader_context

CPU = torch.device("cpu")
WORLDS = st.integers(1, 8)
BATCHES = st.integers(1, 5)


def shares_of_an_epoch(
    samples: int, world_size: int, batch_size: int, full: int, consumed: int = 0
) -> list[list[tuple[list[int], StepShare]]]:
    """[step][rank]: the samples of a rank, and its share."""
    ranks = []
    for rank in range(world_size):
        shares = Shares()
        context = loader_context(batch_size, rank, world_size, events=shares, full_world_size=full)
        loader = Loader(TensorDataset(torch.arange(samples)), context)
        loader.load_state_dict({"seed": 0, "epoch": 0, "consumed": consumed, "samples": samples})
        taken = [batch[0].tolist() for batch in loader]
        ranks.append(list(zip(taken, shares.found, strict=True)))
    return [list(step) for step in zip(*ranks, strict=True)]


@given(data=st.data(), full=WORLDS, batch_size=BATCHES)
def test_a_step_has_as_many_samples_with_fewer_ranks_and_each_sample_is_taken_once(
    data: st.DataObject, full: int, batch_size: int
) -> None:
    world_size = data.draw(st.integers(1, full))
    samples = data.draw(st.integers(full, 100))
    steps = shares_of_an_epoch(samples, world_size, batch_size, full)
    assert sorted(i for step in steps for taken, _ in step for i in taken) == list(range(samples))
    assert len(steps) in (samples // (full * batch_size), -(-samples // (full * batch_size)), 1)
    for step in steps[:-1]:
        assert sum(len(taken) for taken, _ in step) == full * batch_size


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
            for (part,), fraction in split((torch.tensor(taken),), pieces, share.given):
                assert len(part) <= batch_size + 1
                total += share.weight(world_size, fraction) * values[part].mean().item() / world_size
        distinct = {i for taken, _ in step for i in taken}
        assert total == pytest.approx(values[sorted(distinct)].mean().item())


def test_accumulated_micro_batches_are_one_batch_of_a_rank() -> None:
    for make in (Loader, IterableLoader):
        shares = {}
        for rank in range(2):
            given = Shares()
            context = loader_context(3, rank, 2, events=given, accumulate=2, shuffle=False if make is Loader else None)
            if make is Loader:
                data: Any = TensorDataset(torch.arange(29))
                batches = [batch.tolist() for (batch,) in Loader(data, context)]
            else:
                loader = IterableLoader(_Numbers(29), context)
                loader._ask = lambda found: lambda: (2, {6: 12, 3: 5, 2: 5}[found[0]]) if found else (0, 0)  # type: ignore[method-assign]
                iterator = iter(loader)
                batches = [next(iterator).tolist() for _ in range(3)]
            shares[rank] = given.found, [len(batch) for batch in batches]
        assert shares[0] == ([StepShare(12, 6, 2)] * 2 + [StepShare(5, 3, 1)], [6, 6, 3])
        assert shares[1] == ([StepShare(12, 6, 2)] * 2 + [StepShare(5, 2, 1)], [6, 6, 2])
    with pytest.raises(SetupError, match="accumulate=0: expected a whole number, 1 or more"):
        loader_context(3, accumulate=0)


def test_the_number_of_micro_batches_is_that_of_the_rank_with_most_samples() -> None:
    assert [count_pieces(128, ranks, 32) for ranks in (4, 3, 2, 1)] == [1, 2, 2, 4]
    assert count_pieces(129, 4, 32) == 2
    assert count_pieces(1, 4, 32) == 1


def test_a_batch_is_split_with_everything_in_it_that_has_an_entry_for_each_sample() -> None:
    Pair = namedtuple("Pair", "inputs targets")
    batch = {"pair": Pair(torch.arange(5), torch.arange(10).view(5, 2)), "texts": list("abcde"), "scale": 3.0}
    parts: list[Any] = [part for part, _ in split(batch, 2, 5)]
    assert [part["pair"].inputs.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert [part["pair"].targets.shape for part in parts] == [(3, 2), (2, 2)]
    assert [part["texts"] for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert [part["scale"] for part in parts] == [3.0, 3.0]


def test_a_rank_with_fewer_samples_than_micro_batches_repeats_one_without_weight() -> None:
    parts = [(part.tolist(), fraction) for part, fraction in split(torch.tensor([7]), 3, 1)]
    assert parts == [([7], 1.0), ([7], 0.0), ([7], 0.0)]


def test_lists_of_samples_of_any_kind_are_split_with_the_tensors_beside_them() -> None:
    boxes = [{"boxes": torch.zeros(count, 4), "id": count} for count in range(4)]
    images = tuple(torch.full((3, 2), float(each)) for each in range(4))
    batch = {"detection": (images, boxes), "array": numpy.arange(4), "class_weights": torch.ones(10)}
    parts: list[Any] = [part for part, _ in split(batch, 2, 4)]
    assert [[image[0, 0].item() for image in part["detection"][0]] for part in parts] == [[0, 1], [2, 3]]
    assert [[each["id"] for each in part["detection"][1]] for part in parts] == [[0, 1], [2, 3]]
    assert [part["array"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert all(len(part["class_weights"]) == 10 for part in parts)


def test_fields_are_told_from_samples_though_there_are_as_many() -> None:
    fields: list[Any] = [part for part, _ in split([torch.arange(2), ["a", "b"]], 2, 2)]
    assert [(part[0].tolist(), part[1]) for part in fields] == [([0], ["a"]), ([1], ["b"])]
    pair: list[Any] = [part for part, _ in split([torch.arange(4).view(2, 2), torch.arange(2)], 2, 2)]
    assert [(part[0].tolist(), part[1].tolist()) for part in pair] == [([[0, 1]], [0]), ([[2, 3]], [1])]
    with pytest.raises(SetupError, match="2 samples or of 2 fields: have collate_fn return a dictionary of fields"):
        list(split([("a", "b"), ("c", "d")], 2, 2))


def test_rows_of_packed_samples_are_split_where_all_tensors_have_as_many() -> None:
    parts = [(part["x"].tolist(), fraction) for part, fraction in split({"x": torch.arange(3), "n": 7}, 2, 8)]
    assert parts == [([0, 1], 2 / 3), ([2], 1 / 3)]


def test_a_batch_in_which_nothing_has_the_number_of_samples_cannot_be_split() -> None:
    assert list(split("anything", 1, 4)) == [("anything", 1.0)]
    for batch in ({"texts": ["a", "b"]}, (torch.ones(2), torch.ones(3))):
        with pytest.raises(SetupError, match="it has 4 samples, and no tensor or list in it has as many entries"):
            list(split(batch, 2, 4))


def test_an_iterable_keeps_its_global_batch_too() -> None:
    shares = Shares()
    stream = IterableLoader(_Numbers(20), loader_context(3, events=shares, full_world_size=2))
    assert [len(batch) for batch in stream] == [6, 6, 6, 2]
    assert shares.found == [StepShare(6, 6, 2)] * 3 + [StepShare(2, 2, 1)]


class _Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))
