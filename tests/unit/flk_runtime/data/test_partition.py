"""shard(): one rank's contiguous piece of a sequence."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from flk_runtime.data.partition import shard, shard_range
from flk_runtime.errors import SetupError


@given(length=st.integers(0, 300), world_size=st.integers(1, 40))
def test_every_element_is_on_one_rank(length: int, world_size: int) -> None:
    shards = [shard(range(length), rank, world_size) for rank in range(world_size)]
    assert [element for one in shards for element in one] == list(range(length))  # in order, too
    sizes = [len(one) for one in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # where there are too few, the last ranks have none


@given(length=st.integers(0, 50), index=st.integers(-60, 60), begin=st.integers(-60, 60), end=st.integers(-60, 60))
def test_it_behaves_as_the_list_of_its_elements(length: int, index: int, begin: int, end: int) -> None:
    one = shard(range(length), 1, 3)
    same = list(one)
    assert list(one[begin:end]) == same[begin:end]
    assert list(one[begin:end:2]) == same[begin:end:2]
    if -len(same) <= index < len(same):
        assert one[index] == same[index]
    else:
        with pytest.raises(IndexError, match=f"index {index} is out of range for a shard of {len(same)} elements"):
            one[index]


@pytest.mark.parametrize("data", [torch.arange(10), numpy.arange(10), list(range(10)), "0123456789"])
def test_anything_with_an_index(data: Any) -> None:
    assert [int(element) for element in shard(data, 1, 3)] == [4, 5, 6]


def test_elements_are_read_when_asked_for() -> None:
    class Data:
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> int:
            assert index == (1 << 39) + 1
            return 7

    assert shard(Data(), 1, 2)[1] == 7


def test_it_is_a_dataset() -> None:
    batches = DataLoader(shard(TensorDataset(torch.arange(10)), 1, 2), batch_size=2)
    assert [batch.tolist() for (batch,) in batches] == [[5, 6], [7, 8], [9]]


def test_what_is_refused() -> None:
    for data in (iter([1]), {1, 2}, {"a": 1}):
        with pytest.raises(SetupError, match="has no length and index"):
            shard(data, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="already a shard of one rank"):
        shard(shard([1, 2], 0, 2), 0, 2)
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(SetupError, match=f"rank={rank} of world_size={world_size}"):
            shard([1], rank, world_size)
    with pytest.raises(SetupError, match="needs the process group, or rank and world_size"):
        shard([1, 2], 0)


def test_shards_by_hand() -> None:
    assert [list(shard_range(5, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4]]
    assert [list(shard_range(2, rank, 3)) for rank in range(3)] == [[0], [1], []]
    assert repr(shard("abcde", 1, 2)) == "<DataShard: elements 3 to 4 of 5>"
    assert repr(shard("a", 1, 2)) == "<DataShard: no elements of 1>"
