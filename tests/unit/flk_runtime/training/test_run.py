"""Run: what its methods refuse before they communicate."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from flk_runtime.checkpoint import CheckpointOptions, open_checkpoints
from flk_runtime.contract.record import SOURCES
from flk_runtime.data import LoaderOptions
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.training.lines import Lines
from flk_runtime.training.models import Models
from flk_runtime.training.saves import Saves
from flk_runtime.training.step.batches import Batches
from flk_runtime.training.step.steps import Steps


def test_a_step_takes_the_loss_and_no_optimizer() -> None:
    optimizer: Any = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    steps = object.__new__(Steps)
    steps.began = False
    with pytest.raises(SetupError, match=r"run\.step takes the loss, a number, and not SGD"):
        steps.record(optimizer, {}, samples=1, epoch=None)


def test_a_call_that_does_many_steps_prints_and_saves_what_was_due_on_the_way() -> None:
    """A worker of strategy diloco that has caught up."""
    context: Any = SimpleNamespace(
        options=SimpleNamespace(log_every=10, begin_recording=None), page=ProgressPage.private()
    )
    saves, metrics = MagicMock(due=0, **{"manager.steps": 0}), MagicMock()
    steps = Steps(context, saves, metrics)
    printed: list[int] = []
    steps._print_line = lambda *_: printed.append(steps.done)  # type: ignore[method-assign]
    reached = iter((9, 23, 24))
    steps.outer = MagicMock(step=lambda _: next(reached))
    for _ in range(3):
        steps.record(None, {}, samples=1, epoch=lambda: None)
    assert printed == [23]
    assert [call.args for call in saves.save_after_step.call_args_list] == [(0, 9), (9, 23), (23, 24)]


def test_a_loop_of_known_length_tells_the_steps_of_the_job_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = SimpleNamespace(log_every=10, begin_recording=None)
    page = ProgressPage.private()
    context: Any = SimpleNamespace(options=options, page=page, lines=Lines(0, 1), rank=0, world_size=1)
    steps = Steps(context, MagicMock(**{"manager.steps": 30}), MagicMock())
    batches = Batches(context, steps, MagicMock(), MagicMock())
    batches.begin_steps(40)  # no line of metrics follows that could say what is left
    with torch.no_grad():
        batches.begin_steps(200)  # an evaluation
    for _ in range(2):
        batches.begin_steps(60)
    assert capsys.readouterr().out == '{"step": 30, "total": 60}\n'


def test_a_loop_that_begins_at_a_checkpoint_of_its_own_tells_no_place_of_flks() -> None:
    saves, page = object.__new__(Saves), ProgressPage.private()
    saves._context = SimpleNamespace(page=page, say=print)  # type: ignore[assignment]
    options = CheckpointOptions(None, seed=0, metadata={}, timeout=1.0, in_memory=False)
    saves.manager = open_checkpoints(options, pytest.fail, print, print)
    page.restored_from = SOURCES.index("storage")
    saves.begin_at(7)
    assert (page.restored, SOURCES[page.restored_from]) == (7, "")


def test_lines_and_saves_are_asked_for_when_they_are_due() -> None:
    context: Any = SimpleNamespace(
        options=SimpleNamespace(log_every=10, begin_recording=None), page=ProgressPage.private()
    )
    saves = MagicMock(due=0, **{"manager.steps": 0})
    steps = Steps(context, saves, MagicMock())
    printed, asked = [], []
    steps._print_line = lambda *_: printed.append(steps.done)  # type: ignore[method-assign]

    def save_after_step(before: int, done: int) -> bool:
        asked.append(done)
        saves.due = 15
        return True

    saves.save_after_step = save_after_step

    def train(until: int) -> None:
        while steps.done < until:
            steps.record(None, {}, samples=1, epoch=lambda: None)

    train(25)
    assert (printed, asked) == ([10, 20], [1, *range(15, 26)])


def test_a_step_asks_for_saves_until_one_is_complete_and_then_when_the_next_one_is_due() -> None:
    saves = object.__new__(Saves)
    polls = iter((False, True, False, False))
    saves.manager = MagicMock(can_save=True, keeps_in_memory=True, poll=lambda: next(polls))
    saves._context = MagicMock()
    saves._place = MagicMock()
    saves._keep, saves._store, saves.due = 10, None, 0
    found = []
    for step in range(1, 12):
        if step == 4:
            saves.save(3)  # as the script asks
        if step >= saves.due:
            assert saves.save_after_step(step - 1, step)
            found.append(step)
    assert found == [1, 4, 5, 10, 11]
    assert [call.args for call in saves.manager.save.call_args_list] == [(3,), (10,)]


def test_a_step_with_a_batch_of_a_loader_ends_where_the_next_one_is_drawn() -> None:
    options, page = SimpleNamespace(log_every=0, begin_recording=None), ProgressPage.private()
    context: Any = SimpleNamespace(options=options, page=page, lines=MagicMock(), rank=0, world_size=1)
    saves = MagicMock(due=0, **{"manager.steps": 0})
    steps = Steps(context, saves, MagicMock())
    batches, loader = Batches(context, steps, saves, MagicMock()), MagicMock()
    batches._ending = [loader]

    def saved() -> list[tuple[int, int]]:
        return [call.args for call in saves.save_after_step.call_args_list]

    def record(*, draws: bool) -> None:
        steps.record(None, {}, samples=1, epoch=lambda: None, draws=draws)

    record(draws=True)
    assert saved() == []
    with torch.no_grad():  # an evaluation
        batches.draw(loader, goes_on=True)
    batches.draw(loader, goes_on=False)  # a look
    batches.draw(MagicMock(), goes_on=True)  # a loader that is not in use
    thread = threading.Thread(target=lambda: batches.draw(loader, goes_on=True))
    thread.start()
    thread.join()
    assert saved() == []
    batches.draw(loader, goes_on=True)
    batches.draw(loader, goes_on=True)
    assert saved() == [(0, 1)]
    record(draws=False)  # without a loader
    assert saved() == [(0, 1), (1, 2)]
    record(draws=True)
    record(draws=False)  # with the same batch
    assert saved() == [(0, 1), (1, 2), (2, 4)]
    record(draws=True)
    record(draws=True)  # the first one of another loop
    steps.finish()
    assert saved() == [(0, 1), (1, 2), (2, 4), (4, 6)]


def test_a_first_step_after_a_restart_without_a_batch_of_a_loader_is_told() -> None:
    batches, said = object.__new__(Batches), list[str]()
    batches._context = SimpleNamespace(say=said.append)  # type: ignore[assignment]
    batches._saves, batches._given = MagicMock(), set()
    for source, keeps in (("start", False), ("memory", True), ("memory", False)):
        batches._saves.manager.source, batches._saves.manager.keeps_iterable = source, keeps
        batches.say_if_data_begin_anew()
    assert ["script's own data is in no checkpoint" in each for each in said] == [True]


def test_a_sampler_chooses_from_more_than_a_worker_of_diloco_has() -> None:
    with pytest.raises(SetupError, match="of which each worker of strategy diloco has a part"):
        Batches(MagicMock(workers=2, world_size=1), MagicMock(), MagicMock(), MagicMock()).make_loader(
            range(4), LoaderOptions(2, of_torch={"sampler": [1, 2]})
        )


def test_a_loader_that_is_made_for_each_evaluation_has_the_same_order_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed run has made another number of them."""
    batches = Batches(MagicMock(workers=1, world_size=1, rank=0), MagicMock(), MagicMock(), MagicMock())
    monkeypatch.setattr("flk_runtime.training.step.batches._compare", lambda *_: None)
    batches._context.options.keep_batch, batches._context.options.seed = False, 0
    made = [batches.make_loader(range(9), LoaderOptions(2, of_torch={"sampler": None})) for _ in range(3)]
    assert len({each._seed for each in made}) == 1


def test_loaders_read_together_after_a_resume_go_on_with_the_random_numbers_of_the_first() -> None:
    batches, (first, second) = object.__new__(Batches), (MagicMock(), MagicMock())
    batches._saves, batches._begun = MagicMock(), set()
    starts = batches._saves.manager.start_rank_rng
    batches.begin(first), batches.begin(second)  # zip(first, second)
    assert starts.call_count == 1
    batches.begin(first), batches.begin(second)  # the ones before were to look at a batch
    assert starts.call_count == 2


def test_an_evaluation_before_the_first_step_draws_none_of_the_training() -> None:
    batches, loader = object.__new__(Batches), MagicMock()
    batches._saves, batches._begun = MagicMock(), set()
    with torch.no_grad():
        batches.begin(loader)
    batches.begin(MagicMock())
    assert batches._saves.manager.start_rank_rng.call_count == 2


def handed_over(optimizer: torch.optim.Optimizer, *, is_averaged: bool) -> Models:
    models = object.__new__(Models)
    models._context, models._batches = MagicMock(closing=[]), MagicMock()
    models._optimizers, models._frozen, models._is_averaged = {}, set(), is_averaged
    models._hand_over(optimizer)
    return models


@pytest.mark.parametrize("thing", [[0.5], 0.5, None, torch.Generator()])
def test_an_object_without_a_state_is_refused_when_it_is_registered(thing: Any) -> None:
    with pytest.raises(SetupError, match=f"a {type(thing).__name__} has no state that can be saved"):
        object.__new__(Models).register("seen", thing)


def test_an_optimizer_that_is_handed_over_twice_is_looked_at_once() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    models = handed_over(optimizer, is_averaged=False)
    models._hand_over(optimizer)
    optimizer.step()
    assert models._batches.passed.call_count == 1  # type: ignore[attr-defined]


def test_a_parameter_that_a_later_model_has_frozen_is_not_trained_under_ddp() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    models = handed_over(optimizer, is_averaged=True)
    models._frozen.add(model.weight)
    optimizer.step()
    model(torch.ones(1)).backward()
    with pytest.raises(SetupError, match=r"of shape \(1, 1\) of SGD was frozen in parallelize"):
        optimizer.step()


def test_an_optimizer_has_the_mean_loss_from_a_closure_under_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which LBFGS decides on further passes: ranks that decide apart would wait for each other."""
    monkeypatch.setattr(process_group, "mean", lambda loss, weight: 7.0)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    handed_over(optimizer, is_averaged=True)
    assert optimizer.step(lambda: 3.0) == 7.0
    assert optimizer.step(closure=lambda: torch.tensor(3.0)) == 7.0
