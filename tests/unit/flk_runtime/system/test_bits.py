"""Tests of flk_runtime.system.bits."""

from __future__ import annotations

import pytest
import torch

from flk_runtime.system.bits import bit_sum, compared_part, is_compared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_the_sum_tells_any_change_and_no_other_layout(dtype: torch.dtype) -> None:
    values = torch.arange(10_000).view(100, 100).to(dtype)
    before = bit_sum(values)
    assert before == bit_sum(values.t().contiguous().t())
    values[70, 3] = 5
    assert before != bit_sum(values)


def test_the_sum_is_the_same_wherever_the_values_begin_and_tells_their_last_bits() -> None:
    values = torch.arange(50_001, dtype=torch.int16)  # no whole number of int64
    moved = torch.cat((values[:1], values))[1:]
    assert moved.storage_offset()
    assert bit_sum(moved) == bit_sum(values)
    moved[-1] += 1
    assert bit_sum(moved) == bit_sum(values) + 1


def test_the_first_times_are_compared_and_later_ones_now_and_then() -> None:
    found = [each for each in range(1, 1600) if is_compared(each)]
    assert found == [*range(1, 9), *(1 << power for power in range(4, 11)), 1536]


def test_a_large_tensor_is_compared_whole_at_first_and_then_in_parts_until_the_times_are_rare() -> None:
    values = torch.arange(100_000).view(1000, 100)
    whole, small, few = (1, 9, 16, 512), torch.zeros(100), torch.zeros(6, 100_000)
    assert all(compared_part(values, count) is values for count in whole)
    parts = [compared_part(values, count) for count in range(2, 9)]
    assert torch.equal(torch.cat(parts), values)
    assert {len(part) for part in parts} == {142, 143}
    assert all(compared_part(each, 5) is each for each in (small, few, torch.tensor(1.0), torch.zeros(0, 3)))
