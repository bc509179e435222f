"""Which place each training of a process has, and for which one the memory of the pods is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flk_runtime.contract import user_env
from flk_runtime.errors import SetupError
from flk_runtime.run import adopt, init, script
from flk_runtime.run.process import Process


def begin(process: Process, name: str | None, *, keeps: bool = True) -> tuple[str | None, bool]:
    place, in_memory = process.next_place(name)
    process.place(name).trainings += 1
    if keeps:
        process.hold_memory(place)
    return place, in_memory


def test_a_later_training_in_a_place_has_a_folder_of_its_own_by_its_number(tmp_path: Path) -> None:
    process, place = Process(), str(tmp_path / "checkpoints")
    assert [begin(process, name)[0] for name in (place, f"{place}/", str(tmp_path / "other"), place)] == [
        place,
        f"{place}/training-1",
        str(tmp_path / "other"),
        f"{place}/training-2",
    ]
    names = [begin(process, "s3://bucket/prefix/")[0] for _ in range(2)]
    assert names == ["s3://bucket/prefix/", "s3://bucket/prefix/training-1"]


def test_the_memory_of_the_pods_is_for_the_first_training_that_keeps_its_state(tmp_path: Path) -> None:
    process, place = Process(), str(tmp_path)
    assert begin(process, place, keeps=False) == (place, True)
    assert begin(process, place) == (f"{place}/training-1", True)
    assert begin(process, place) == (f"{place}/training-2", False)
    assert process.memory is process.place(f"{place}/training-1/")


def test_without_a_place_only_the_first_training_is_kept() -> None:
    process = Process()
    assert [begin(process, None) for _ in range(2)] == [(None, True), (None, False)]


def test_the_memory_waits_for_the_default_place_or_else_for_the_first_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = Process()
    first, other, default = (process.place(str(tmp_path / name)) for name in ("first", "other", "default"))
    assert process.gives_memory(first)
    first.manager = SimpleNamespace()  # type: ignore[assignment]
    assert [process.gives_memory(place) for place in (first, other)] == [True, False]
    monkeypatch.setenv(user_env.CHECKPOINT, f"{default.name}/")
    assert [process.gives_memory(place) for place in (first, default)] == [False, True]
    process.training = SimpleNamespace(manager=SimpleNamespace(place=other.name))  # type: ignore[assignment]
    assert [process.gives_memory(place) for place in (default, other)] == [False, True]
    process.hold_memory(first.name)
    assert [process.gives_memory(place) for place in (first, default, other)] == [True, False, False]


def test_another_optimizer_in_a_place_is_found_by_its_name(tmp_path: Path) -> None:
    place, parameters = Process().place(str(tmp_path)), [torch.nn.Parameter(torch.ones(1))]
    first, second = (torch.optim.SGD(parameters, lr=0.1) for _ in range(2))
    place.trains({"optimizer": first, "progress": {}})
    assert place.other_optimizer({"optimizer": first, "progress": {}, "new": second}) is None
    assert place.other_optimizer({"progress": {}, "optimizer": second}) == "optimizer"
    del first
    assert place.other_optimizer({"optimizer": second}) == "optimizer"


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Process:
    process = Process()
    for module in (init, adopt, script):
        monkeypatch.setattr(module, "current", process)
    return process


def test_a_second_training_before_the_first_one_is_closed_is_refused_by_name(current: Process) -> None:
    open_loop: Any = SimpleNamespace(closed=False)
    current.training = open_loop
    with pytest.raises(SetupError, match=r"init: flk\.adopt keeps the state of this process's loop"):
        init.init()
    with pytest.raises(SetupError, match="adopt: this process has a run or a loop already"):
        adopt.adopt(state={})


def test_an_optimizer_of_another_training_in_one_place_is_refused_and_told_what_to_pass(
    current: Process, tmp_path: Path
) -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    first, second = (torch.optim.SGD(parameters, lr=0.1) for _ in range(2))
    place = current.place(str(tmp_path / "saved"))
    place.trains({"optimizer": first})
    with pytest.raises(SetupError, match=r"trained another optimizer .* such as each fold, a checkpoint= of its own; "):
        script.restore(str(tmp_path / "saved"), optimizer=second)
    current.place(str(tmp_path / "run")).kept = True
    with pytest.raises(SetupError, match=r"which is closed, .* or leave out the optimizer for the weights alone"):
        script.restore(str(tmp_path / "run"), optimizer=second)
