"""The process group of a planned script: the ranks that are not there do as rank 0 does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from flk_plan.group import open_group


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    open_group(16)
    yield
    dist.destroy_process_group()


def test_collectives_are_as_if_all_ranks_gave_the_same() -> None:
    total, largest = torch.ones(3), torch.full((2,), 5.0)
    dist.all_reduce(total)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True).wait()
    assert total.tolist() == [16.0] * 3
    assert largest.tolist() == [5.0] * 2
    gathered: list[object] = [None] * 16
    dist.all_gather_object(gathered, {"rank": "any"})
    assert gathered == [{"rank": "any"}] * 16
    sent = ["kept"]
    dist.broadcast_object_list(sent, src=0)
    assert sent == ["kept"]
    dist.barrier()


def test_what_one_rank_gathers_is_as_if_all_ranks_gave_the_same() -> None:
    gathered: list[object] = [None] * 16
    dist.gather_object({"rank": "any"}, gathered, dst=0)
    assert gathered == [{"rank": "any"}] * 16
    dist.gather_object({"rank": "any"}, None, dst=5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch has other names for them
def test_collectives_of_one_tensor_have_the_parts_of_all_ranks() -> None:
    whole, own = torch.zeros(32, 3), torch.arange(6.0).view(2, 3)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, own.repeat(16, 1))
