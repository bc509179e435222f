"""An optimizer that cannot compute with shards is refused by its name; other errors stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flk_runtime.errors import SetupError
from flk_runtime.parallel.step_errors import explain_errors


class Failing(torch.optim.SGD):
    error: Exception

    def step(self, closure: Any = None) -> None:
        raise self.error


def test_an_error_of_dtensor_names_the_optimizer_and_others_stay() -> None:
    optimizer = Failing([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        explain_errors(optimizer)
    optimizer.error = RuntimeError("got mixed torch.Tensor and DTensor\nand more")
    with pytest.raises(SetupError, match=r"Failing cannot train .*: got mixed torch.Tensor and DTensor; use another"):
        optimizer.step()
    optimizer.error = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_made_before_and_after_see_the_steps(before: bool) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    make = lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # noqa: E731
    schedulers = [make()] if before else []
    explain_errors(optimizer)
    schedulers.append(make())
    optimizer.step()
    for each in schedulers:
        each.step()  # which warns where it has seen no step, and warnings are errors
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** len(schedulers))
