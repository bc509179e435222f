"""What counts as a difference, and which cause fits it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flk_verify.causes import Evidence, cause_of
from flk_verify.compare import BEFORE, GRADIENT, Comparison, scale_between, tolerance
from flk_verify.watch import Step

FACTS: dict[str, Any] = {
    "eps": torch.finfo(torch.float32).eps, "compute_eps": 0.0, "sums": [1.0, 4.0], "calls": 1, "uneven": False,
    "random": False, "batch_norm": False, "held": False, "sharded": False, "hyperparameters": ["lr=0.1"],
}  # fmt: skip


def step(
    *gradients: torch.Tensor | None, parameter: float = 1.0, mean: torch.Tensor | None = None, **facts: Any
) -> Step:
    parameters = [torch.full((4, 4), parameter) for _ in gradients]
    means = [mean for _ in gradients]
    return Step(0, 1, [str(n) for n in range(len(gradients))], parameters, list(gradients), means, FACTS | facts)


GIVEN = torch.arange(1.0, 17.0).view(4, 4)


def causes(ranks: Step, whole: Step) -> str:
    difference = Comparison().before(ranks, whole)
    return cause_of(Evidence(ranks, whole, difference, 2))[0] if difference else ""


@pytest.mark.parametrize(
    ("ranks", "whole", "cause"),
    [
        (step(GIVEN * (1 + 1e-5)), step(GIVEN), ""),
        (step(GIVEN * 1.05, compute_eps=torch.finfo(torch.bfloat16).eps), step(GIVEN), ""),
        (step(GIVEN, torch.full((4, 4), 1e-7)), step(GIVEN, torch.full((4, 4), -1e-7)), ""),
        (step(GIVEN, parameter=1.001), step(GIVEN), "other parameters before the step"),
        (step(GIVEN * 2, mean=GIVEN), step(GIVEN), "not reduced"),
        (step(GIVEN / 2), step(GIVEN), "sum in place of mean"),
        (step(GIVEN * 2), step(GIVEN), "multiplied by the ranks"),
        (step(GIVEN * 0.7), step(GIVEN), "one factor"),
        (step(torch.cat([GIVEN[:2] * 0.5, GIVEN[2:] * 0.8]), sharded=True), step(GIVEN), "clipping by a local norm"),
        (step(None), step(GIVEN), "missing gradients"),
        (step(GIVEN), step(None), "a replaced parameter"),
        (step(GIVEN.flip(0), sums=[5.0, 9.0]), step(GIVEN), "other data"),
        (step(GIVEN.flip(0), random=True), step(GIVEN), "random numbers"),
        (step(GIVEN.flip(0), batch_norm=True), step(GIVEN), "BatchNorm"),
        (step(GIVEN.flip(0)), step(GIVEN), "a loss over the samples of a rank"),
    ],
)
def test_a_difference_is_found_with_its_cause_and_rounding_is_none(ranks: Step, whole: Step, cause: str) -> None:
    assert causes(ranks, whole) == cause


def test_changes_of_parameters_are_compared_where_gradients_agree() -> None:
    noise = GIVEN.clone()
    noise[0, 0] = -1e-9
    ranks, whole = step(noise), step(torch.where(noise == -1e-9, 1e-9, noise))
    comparison = Comparison()
    assert comparison.before(ranks, whole) == []
    one, other = (torch.full((4, 4), 0.9) for _ in range(2))
    one[0, 0] = 1.1  # the optimizer has divided what was rounding by its size
    assert comparison.after(ranks, [one], [other]) == []
    other[1, 1] = 0.5
    (difference,) = comparison.after(ranks, [one], [other])
    assert difference.what not in (GRADIENT, BEFORE)
    assert difference.largest == pytest.approx(0.4)
    evidence = Evidence(ranks, step(noise, hyperparameters=["lr=0.2"]), [difference], 2)
    assert cause_of(evidence)[0] == "learning rate"
    assert cause_of(Evidence(step(noise, sharded=True), whole, [difference], 2))[0] == "steps of shards"


def test_the_tolerance_follows_the_coarsest_type() -> None:
    assert tolerance(step(GIVEN)) == pytest.approx(6.9e-4, rel=0.01)
    assert tolerance(step(GIVEN.bfloat16())) == pytest.approx(0.177, rel=0.01)


def test_one_factor_between_all_tensors_is_found_or_none() -> None:
    assert scale_between([GIVEN * 3, None], [GIVEN, GIVEN], 0.01) == pytest.approx(3.0)
    assert scale_between([GIVEN, GIVEN * 2], [GIVEN, GIVEN], 0.01) is None
