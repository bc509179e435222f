"""Orders of an epoch: permutations that depend on seed and epoch, and look random."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.data.order import OWN, SHUFFLED, EpochOrder


def shuffled(samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    found: list[int] = EpochOrder(SHUFFLED, samples, seed, epoch).at(torch.arange(samples)).tolist()
    return found


@given(samples=st.integers(1, 600), seed=st.integers(0, 1 << 62))
def test_every_sample_is_at_one_position(samples: int, seed: int) -> None:
    assert sorted(shuffled(samples, seed)) == list(range(samples))


def test_an_order_depends_on_seed_and_epoch_only() -> None:
    assert len({tuple(shuffled(100, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # A run that resumes with a newer flk goes on in the order that it began.
    assert shuffled(20, 1, 2) == [16, 15, 5, 10, 11, 1, 8, 12, 17, 9, 18, 6, 0, 4, 7, 2, 19, 3, 14, 13]
    part = EpochOrder(SHUFFLED, 100, 1, 2).at(torch.tensor([7, 90]))
    assert part.tolist() == [shuffled(100, 1, 2)[7], shuffled(100, 1, 2)[90]]
    assert EpochOrder(OWN, 5, 1, 2).at(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_all_orders_are_about_equally_frequent() -> None:
    counts = Counter(tuple(shuffled(4, seed)) for seed in range(2400))
    assert len(counts) == 24
    assert min(counts.values()) > 60  # 100 is expected, with a deviation of 10
    assert max(counts.values()) < 150
