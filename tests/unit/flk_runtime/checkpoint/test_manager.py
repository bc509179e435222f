"""What a save waits for before it reads the state, and what it does with an error of one rank."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flk_runtime.checkpoint import CheckpointManager, CheckpointOptions, ModuleState, open_checkpoints
from flk_runtime.checkpoint.manager import Resumed, progress_of
from flk_runtime.checkpoint.state import split_tensors
from flk_runtime.checkpoint.stateful import Values, per_rank, replicated, state_of
from flk_runtime.distributed import process_group
from flk_runtime.errors import SetupError
from flk_runtime.system import device, rng
from tests.support.environments import INSIDE_FLK


def make_manager() -> CheckpointManager:
    options = CheckpointOptions(place=None, seed=0, metadata={}, timeout=60.0, needs_model=False)
    return open_checkpoints(options, print, print, print)


def test_the_memory_is_for_the_ranks_that_the_launcher_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**INSIDE_FLK, "FLK_MEMORY": "/nowhere/memory"}.items():
        monkeypatch.setenv(name, value)
    assert not make_manager().can_save


def test_a_save_reads_the_state_when_all_streams_of_the_gpu_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may step on a stream of its own, which the stream of the copy does not wait for."""
    order: list[str] = []

    class Scale:
        def state_dict(self) -> dict[str, Any]:
            order.append("read")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    manager = make_manager()
    manager.register("scale", Scale())
    saver: Any = SimpleNamespace(can_save=True, held=None, save=lambda *_, **__: order.append("copied"))
    monkeypatch.setattr(manager, "_saver", saver)
    monkeypatch.setattr(device, "synchronize", lambda: order.append("waited"))
    manager.save(1)
    assert order == ["waited", "read", "copied"]


def test_a_rank_whose_state_cannot_be_read_answers_the_others_before_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for its answer for ever."""
    answers: list[bool] = []

    class Broken(ModuleState):
        def held_alike(self) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError

    def all_true(flag: bool) -> Any:
        answers.append(flag)
        return False

    monkeypatch.setattr(process_group, "world_size", lambda: 2)
    monkeypatch.setattr(process_group, "all_true", all_true)
    manager = make_manager()
    manager.register("model", Broken(torch.nn.Linear(1, 1)))
    with pytest.raises(ZeroDivisionError):
        manager._compare()
    assert answers == [False]


def test_progress_is_told_by_the_numbers_of_positions() -> None:
    """The rest of a position may hold arrays, which cannot be compared, or be encoded as in the checkpoint."""
    position = {"seed": 1, "epoch": 2, "consumed": 3, "data": np.arange(3)}
    assert progress_of(4, {"data": position}) == progress_of(4, {"data": split_tensors(position, ("data",)).plain})
    assert progress_of(4, {"data": position}) != progress_of(4, {"data": {**position, "consumed": 2}})


def test_a_named_loader_that_is_made_after_the_first_step_begins_anew() -> None:
    class Thing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    position = {"seed": 1, "epoch": 2, "consumed": 3, "trained": False}
    objects: Any = {
        "val": SimpleNamespace(plain=position, is_of_model=lambda: False),
        "scale": SimpleNamespace(plain={}, is_of_model=lambda: False),
    }
    resumed = Resumed("step 4", 4, objects, {}, {}, rng.get_state(), (4, {}), None)
    manager = CheckpointManager(make_manager().options, print, resumed=resumed)
    manager.finish_restoring()
    manager.register("val", Thing())
    with pytest.raises(SetupError, match="'scale' is in the checkpoint that was resumed"):
        manager.register("scale", Thing())


@pytest.mark.parametrize(("steps", "is_current"), [(4, False), (5, True)])
def test_a_save_after_the_restored_step_has_the_current_random_states(
    monkeypatch: pytest.MonkeyPatch, steps: int, is_current: bool
) -> None:
    """Nobody may have seen the first pass, as where the script calls `forward` of a module."""
    saved: list[Any] = []
    manager = make_manager()
    saver = SimpleNamespace(can_save=True, held=None, save=lambda *args, **_: saved.append(args))
    monkeypatch.setattr(manager, "_saver", saver)
    restored = manager._rng_state = rng.get_state()
    manager.steps = 4
    torch.rand(1)
    manager.save(steps)
    assert (saved[0][2]["random"] is not restored) == is_current
    before = torch.get_rng_state()
    manager.begin_rank_rng()
    assert torch.equal(torch.get_rng_state(), before) == is_current


@pytest.mark.parametrize(
    "declare", [lambda thing: thing, per_rank, replicated], ids=["plain", "per rank", "replicated"]
)
def test_a_model_over_which_one_can_loop_is_no_loader(declare: Any) -> None:
    class Batches(list[int]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    manager = make_manager()
    manager.register("model", declare(torch.nn.Sequential()))
    assert not manager.keeps_iterable
    manager.register("batches", declare(Batches()))
    assert manager.keeps_iterable


def test_a_dictionary_is_restored_in_place_and_its_tensors_stay_on_their_devices() -> None:
    """The script may hold what is in it by other names."""
    on_device = torch.zeros((), device="meta")
    average, history = {"weight": on_device, "later": 1}, [3.0]
    values: dict[str, Any] = {"sum": on_device, "count": 0, "average": average, "history": history}
    restored = {"sum": torch.ones(()), "count": 3, "new": torch.ones(()), "average": {"weight": torch.ones(())}}
    Values(values).load_state_dict({**restored, "history": [1.0, 2.0]})
    assert (values["sum"].device.type, values["count"], values["new"].device.type) == ("meta", 3, "cpu")
    assert (list(average), history) == (["weight"], [1.0, 2.0])
    assert values["average"]["weight"].device.type == "meta"
    Values(values).load_state_dict({"average": Counter(later=2), "history": (1.0,)})  # each with the class that it had
    assert (type(values["average"]), type(values["history"]), history) == (Counter, tuple, [1.0, 2.0])


def test_a_function_in_the_state_of_a_scheduler_is_the_scripts() -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), 1)
    scheduler.anneal = len  # type: ignore[attr-defined]
    assert "anneal" not in state_of(scheduler)
    assert "step_size" in state_of(replicated(scheduler))
