"""WeightedMean in one process; tests/local/test_accumulation.py has several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from flk_runtime.errors import SetupError
from flk_runtime.training.step.weighted_mean import WeightedMean


def gradient_of(weights: Sequence[float], parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient of the mean of 1 p², 2 p², … with these weights."""
    mean = WeightedMean([parameter], len(weights), world_size=1)
    for number, weight in enumerate(weights, 1):
        loss = (number * parameter.square()).sum()
        mean.backward(loss, torch.tensor(weight, dtype=torch.float64), is_last=number == len(weights))
    return parameter.grad


@pytest.mark.promise("Training: Gradients are accumulated and weighted as in one process")
@pytest.mark.parametrize(
    ("weights", "expected"), [([3], 1), ([1, 1], 1.5), ([0, 1], 2), ([4, 2, 0], 8 / 6), ([0], 0), ([0, 0], 0)]
)
def test_the_gradient_is_that_of_the_mean_and_is_added_to_earlier_ones(
    weights: Sequence[float], expected: float
) -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(gradient_of(weights, parameter), torch.tensor([2.0, 6.0]) * expected)
    torch.testing.assert_close(gradient_of(weights, parameter), torch.tensor([4.0, 12.0]) * expected)
    torch.testing.assert_close(gradient_of([1, 2], parameter), torch.tensor([2.0, 6.0]) * (2 * expected + 5 / 3))


def test_sparse_gradients_are_corrected_too() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    mean = WeightedMean([table.weight], 2, world_size=1)
    for number, weight in enumerate((3.0, 1.0)):
        mean.backward(
            table(torch.tensor([number])).sum(), torch.tensor(weight, dtype=torch.float64), is_last=number == 1
        )
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:3].tolist() == [[0.75, 0.75], [0.25, 0.25], [0, 0]]


def test_large_weights_do_not_overflow_in_float16() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float16))
    torch.testing.assert_close(gradient_of([30000, 60000], parameter), torch.tensor([10 / 3], dtype=torch.float16))


def test_several_micro_batches_without_a_parallelized_model_are_refused() -> None:
    with pytest.raises(SetupError, match="needs a model of parallelize"):
        WeightedMean([], 2, world_size=1)
