"""shard(): one rank's contiguous piece of a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.data.partition import shard
from flk_runtime.errors import SetupError


@given(length=st.integers(0, 300), world_size=st.integers(1, 40))
def test_every_element_is_on_one_rank(length: int, world_size: int) -> None:
    shards = [shard(range(length), rank, world_size) for rank in range(world_size)]
    assert [element for one in shards for element in one] == list(range(length))  # in order, too
    sizes = [len(one) for one in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # where there are too few, the last ranks have none


def test_elements_are_read_when_asked_for() -> None:
    class Data:
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: int) -> int:
            assert index == (1 << 39) + 1
            return 7

    assert shard(Data(), 1, 2)[1] == 7


def test_what_is_refused() -> None:
    for data in (iter([1]), {1, 2}, {"a": 1}):
        with pytest.raises(SetupError, match="has no length and index"):
            shard(data, 0, 1)
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(SetupError, match=f"rank={rank} of world_size={world_size}"):
            shard([1], rank, world_size)
    with pytest.raises(SetupError, match="needs the process group, or rank and world_size"):
        shard([1, 2], 0)
