"""The steps of a script that uses nothing of flk are counted through its optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from flk_runtime.contract.record import SOURCES
from flk_runtime.shared.optimizer_steps import StepCounter
from flk_runtime.shared.progress import Phase, ProgressPage


def optimizer(kind: Any = torch.optim.Adam, state: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    made: torch.optim.Optimizer = kind([weight], lr=0.1)
    if state:
        made.load_state_dict(copy.deepcopy(state))
    return made


def counted(*steps: torch.optim.Optimizer, page: ProgressPage | None = None) -> ProgressPage:
    page = page or ProgressPage.private()
    counter = StepCounter(page)
    for each in steps:
        each.step()
        counter(each, (), {})
    return page


def restored(page: ProgressPage, step: int, source: str) -> None:
    page.restored, page.restored_from = step, SOURCES.index(source)


def test_the_steps_of_one_optimizer() -> None:
    one = optimizer()
    page = counted(one, one, one)
    assert (page.step, page.first_step, page.restored, SOURCES[page.restored_from]) == (3, 1, 0, "start")
    assert page.boundary == -1, "the rank cannot stop at a step"


SEVERAL: dict[str, tuple[Callable[[Any, Any], list[Any]], int]] = {
    "in turn": (lambda a, b: [a, b] * 4, 4),
    "a critic steps more often": (lambda a, b: [a, *[b] * 5] * 3, 15),  # 1 + 4, and then all of them
    "a critic steps first": (lambda a, b: [*[b] * 5, a] * 3, 15),
    "one replaces another": (lambda a, b: [a] * 3 + [b] * 3, 5),
}


@pytest.mark.parametrize(("order", "expected"), SEVERAL.values(), ids=SEVERAL.keys())
def test_of_several_optimizers_the_one_that_steps_most_counts(
    order: Callable[[Any, Any], list[Any]], expected: int
) -> None:
    assert counted(*order(optimizer(), optimizer())).step == expected


def test_an_optimizer_that_is_gone_does_not_hold_up_the_count() -> None:
    page = ProgressPage.private()
    counter = StepCounter(page)
    for _ in range(3):
        each = optimizer()
        counter(each, (), {})
        del each
    assert page.step == 3


def test_steps_before_a_resume_are_counted_where_the_optimizer_knows_them() -> None:
    first = optimizer()
    counted(*[first] * 7)
    page = counted(optimizer(state=first.state_dict()))
    assert (page.step, page.restored, SOURCES[page.restored_from]) == (8, 7, "")


def test_a_step_by_which_torchs_checkpoints_make_the_state_of_an_optimizer_is_none() -> None:
    first, page = optimizer(), ProgressPage.private()
    counted(*[first] * 7)
    model = torch.nn.Linear(1, 1)
    resumed = torch.optim.Adam(model.parameters())
    resumed.register_step_post_hook(StepCounter(page))
    state = get_optimizer_state_dict(model, resumed)
    assert page.step == -1
    for each in state["state"].values():
        each["step"].fill_(7)
    set_optimizer_state_dict(model, resumed, state)
    model(torch.ones(1, 1)).sum().backward()
    resumed.step(closure=None)
    assert (page.step, page.restored, SOURCES[page.restored_from]) == (8, 7, "")


def test_of_an_optimizer_without_a_count_it_is_unknown_where_it_began() -> None:
    page = counted(*[optimizer(torch.optim.SGD)] * 2)
    assert (page.step, page.restored) == (2, -1)


def test_beside_a_run_of_flk_nothing_is_counted() -> None:
    page = ProgressPage.private()
    page.phase = Phase.TRAINING
    assert counted(optimizer(), page=page).step == -1


@pytest.mark.parametrize(("found", "source"), [((7, "storage"), "storage"), ((0, "start"), "start")])
def test_steps_before_a_resume_are_counted_where_flk_has_restored_them(found: tuple[int, str], source: str) -> None:
    page = ProgressPage.private()
    restored(page, *found)
    counted(*[optimizer(torch.optim.SGD)] * 2, page=page)
    assert (page.step, page.restored, SOURCES[page.restored_from]) == (found[0] + 2, found[0], source)


def test_an_optimizer_knows_its_steps_better_than_the_number_of_a_checkpoint() -> None:
    """A script may number its checkpoints by epochs."""
    first, page = optimizer(), ProgressPage.private()
    counted(*[first] * 7)
    restored(page, 1, "storage")
    counted(optimizer(state=first.state_dict()), page=page)
    assert (page.step, page.restored, SOURCES[page.restored_from]) == (8, 7, "")
    page = ProgressPage.private()
    restored(page, 7, "memory")
    counted(optimizer(state=first.state_dict()), page=page)
    assert (page.step, page.restored, SOURCES[page.restored_from]) == (8, 7, "memory")
