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


def test_what_one_rank_gathers_or_scatters_is_as_if_all_ranks_gave_the_same() -> None:
    total, of_another = torch.ones(3), torch.ones(3)
    dist.reduce(total, dst=0)
    dist.reduce(of_another, dst=5)
    assert total.tolist() == [16.0] * 3
    assert of_another.tolist() == [1.0] * 3
    gathered: list[object] = [None] * 16
    dist.gather_object({"rank": "any"}, gathered, dst=0)
    assert gathered == [{"rank": "any"}] * 16
    dist.gather_object({"rank": "any"}, None, dst=5)
    own, parts = torch.zeros(2), [torch.full((2,), float(rank)) for rank in range(16)]
    dist.scatter(own, [each + 7 for each in parts], src=0)
    assert own.tolist() == [7.0] * 2
    dist.scatter(own, src=5)
    assert own.tolist() == [7.0] * 2
    dist.reduce_scatter(own, [each + 1 for each in parts])
    assert own.tolist() == [16.0] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch has other names for them
def test_collectives_of_one_tensor_have_the_parts_of_all_ranks() -> None:
    whole, own = torch.zeros(32, 3), torch.arange(6.0).view(2, 3)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole, own.repeat(16, 1))
    reduced = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(reduced, whole, op=dist.ReduceOp.MAX)
    assert torch.equal(reduced, own)
