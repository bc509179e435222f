"""Random numbers that do not depend on the number of samples."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flk_verify.random_numbers import SameNumbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: torch.rand(n, 5),
        lambda n: torch.randn(n, 5),
        lambda n: torch.randint(3, 9, (n, 5)),
        lambda n: torch.zeros(n, 5).uniform_(-2, 2),
        lambda n: torch.zeros(n, 5).normal_(1, 2),
        lambda n: torch.bernoulli(torch.full((n, 5), 0.4)),
        lambda n: F.dropout(torch.ones(n, 5), 0.5),
        lambda n: nn.functional.scaled_dot_product_attention(*[torch.ones(n, 2, 5, 4)] * 3, dropout_p=0.5),
    ],
)
def test_all_samples_get_the_same_numbers(draw: Callable[[int], torch.Tensor]) -> None:
    with SameNumbers() as numbers:
        few, many = draw(2), draw(6)
        assert torch.equal(many[:2], few)
        assert torch.equal(many[4:], few)
        assert not numbers.has_others


def test_a_generator_of_the_script_stays_and_a_loop_over_draws_ends() -> None:
    own = torch.Generator().manual_seed(7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    with SameNumbers():
        assert torch.equal(torch.rand(3, generator=own), expected)
        assert any(torch.rand(1) <= 0.2 for _ in range(11_000))


def test_draws_that_cannot_be_made_equal_are_noted() -> None:
    with SameNumbers() as numbers:
        torch.zeros(3).cauchy_()
        assert numbers.has_others
    numbers = SameNumbers()
    random.random()
    assert numbers.has_others


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_lstm_on_a_gpu_draws_for_its_dropout_alone(dropout: float) -> None:
    """Else each difference of a model with one would be laid to random numbers."""
    x, state = torch.empty(2, 3, 4, device="meta"), torch.empty(1, 3, 4, device="meta")
    with SameNumbers() as numbers:
        torch.ops.aten._cudnn_rnn(x, [], 4, x, state, state, 2, 4, 0, 1, False, dropout, True, False, [], None)
        assert numbers.has_others == bool(dropout)


def test_the_coarsest_type_of_results_is_noted() -> None:
    with SameNumbers() as numbers:
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert numbers.eps == torch.finfo(torch.float32).eps
        torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()
        assert numbers.eps == torch.finfo(torch.bfloat16).eps
