"""When the optimizers of a run are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from flk_runtime.run.optimizers import OptimizerWatch


def test_an_optimizer_without_a_state_is_not_looked_at_in_each_step() -> None:
    model, looks = torch.nn.Linear(2, 1), 0

    def trained() -> Any:
        nonlocal looks
        looks += 1
        return model.parameters()

    batches = SimpleNamespace(passed=lambda: None)
    watch = OptimizerWatch(batches, averages=False, trained=trained)  # type: ignore[arg-type]
    try:
        first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        for optimizer in [first] * 99 + [second]:
            optimizer.step()
            assert watch.is_unchecked
            watch.check_saved([first, second], ())
    finally:
        watch.close()
    assert looks == 8 + 3 + 1  # in the first 8 steps, in steps 16, 32 and 64, and at the first step of the second one
