"""What the runtime reads of torch's private names is there, and does what its docstrings say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flk_runtime.system import torch_private


def test_a_profiler_that_runs_is_known() -> None:
    assert not torch_private.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiled()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which has the defaults."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.param_groups = inside, inside.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inside.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step(closure)


def test_an_optimizer_around_another_one_keeps_the_defaults_of_that_one() -> None:
    optimizer = Around(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    torch_private.complete_optimizer(optimizer)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(optimizer.defaults["lr"]))
    optimizer.step()
    assert steps == [0.1]


@pytest.mark.parametrize("first", [True, False])
def test_the_hooks_of_an_optimizer_run_beside_a_scheduler_and_others_of_its_class_train_without(first: bool) -> None:
    class Own(Around):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

    optimizer, other = (Own(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)) for _ in range(2))
    if first:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_private.complete_optimizer(optimizer)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda each, *_: steps.append(each))
    if not first:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.zero_grad()
    optimizer.step()
    other.step()
    assert steps == [optimizer]


def test_torch_has_what_ranks_need_of_process_groups() -> None:
    assert torch_private.flight_recorder("no such function") is None
    for name in ("_get_default_store", "_abort_process_group"):
        assert hasattr(torch.distributed.distributed_c10d, name)
