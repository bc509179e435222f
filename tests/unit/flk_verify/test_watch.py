"""What is seen of a script's steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from flk_runtime.checkpoint import CheckpointManager
from flk_runtime.data import LoaderOptions
from flk_runtime.distributed import process_group
from flk_runtime.training.step.batches import Batches
from flk_verify import watch
from flk_verify.watch import Step, Watch


class Shown:
    """Notes the steps."""

    def __init__(self) -> None:
        self.before_steps: list[Step] = []
        self.after_steps: list[Step] = []

    def before(self, step: Step) -> None:
        self.before_steps.append(step)

    def after(self, optimizer: Optimizer, step: Step) -> None:
        self.after_steps.append(step)

    def loader(self, number: int, options: LoaderOptions) -> LoaderOptions:
        return options


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    """What a watch of this process shows."""
    handles: list[Any] = []
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook",
                 "register_module_forward_pre_hook", "register_module_forward_hook"):  # fmt: skip
        register = getattr(watch, name)
        monkeypatch.setattr(
            watch, name, lambda *args, register=register, **named: handles.append(register(*args, **named))
        )
    monkeypatch.setattr(CheckpointManager, "_set_rng", CheckpointManager._set_rng)  # taken back at the end
    monkeypatch.setattr(Batches, "make_loader", Batches.make_loader)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shown = Shown()
    with Watch(100, shown).watching():
        yield shown
    for handle in handles:
        handle.remove()
    for left in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
        getattr(nn.modules.module, left).clear()  # torch 2.13 removes a hook from one of its tables only
    dist.destroy_process_group()


def test_steps_are_seen_after_one_that_has_raised(shown: Shown) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(2))])  # so that torch calls hooks in the step of the base class, too

    class Fails(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise ValueError
            super().step(closure)

    optimizer = Fails([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError):  # noqa: PT011
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    optimizer.step()
    assert [step.number for step in shown.before_steps] == [1, 2, 3]
    assert len(shown.after_steps) == 2


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # hooks of all modules
def test_a_script_that_compiles_its_model_without_graph_breaks_makes_its_steps(shown: Shown) -> None:
    model = torch.compile(nn.Linear(3, 3), fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert shown.before_steps[0].names == ["weight", "bias"]
    assert len(shown.after_steps) == 1


def test_ranks_but_the_first_keep_no_tensors(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "rank", lambda: 1)
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    reduced: list[torch.dtype] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: reduced.append(tensor.dtype))
    torch.optim.SGD([parameter]).step()
    (step,) = shown.before_steps
    assert all(each is not None and not each.numel() for each in (*step.parameters, *step.gradients, *step.mean))
    assert reduced == [torch.bfloat16]


@pytest.mark.filterwarnings("error")
def test_passes_are_seen_after_one_that_has_raised(shown: Shown) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert shown.before_steps[0].names == ["weight", "bias"]
    assert shown.before_steps[0].facts["calls"] == 2
