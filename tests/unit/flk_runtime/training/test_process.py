"""Which place each training of a process has, and for which one the memory of the pods is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flk_runtime.checkpoint import OptimizerState
from flk_runtime.errors import SetupError
from flk_runtime.training.entry import adopt, init, script
from flk_runtime.training.process import Process


def begin(process: Process, name: str | None) -> tuple[str | None, bool]:
    place, in_memory = process.next_place(name)
    process.place(name).trainings += 1
    return place.name, in_memory


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


def test_the_memory_of_the_pods_is_for_the_first_training(tmp_path: Path) -> None:
    process, place = Process(), str(tmp_path)
    assert begin(process, place) == (place, True)
    assert begin(process, place) == (f"{place}/training-1", False)
    assert process.takes_memory(process.place(f"{place}/"))


def test_without_a_place_only_the_first_training_is_kept() -> None:
    process = Process()
    assert [begin(process, None) for _ in range(2)] == [(None, True), (None, False)]


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
    place.manager = SimpleNamespace(get={"optimizer": OptimizerState(first, {})}.get)  # type: ignore[assignment]
    with pytest.raises(SetupError, match=r"trained another optimizer .* such as each fold, a checkpoint= of its own; "):
        script.restore(str(tmp_path / "saved"), optimizer=second)
    current.place(str(tmp_path / "run")).saved_by = "training"
    with pytest.raises(SetupError, match=r"which is closed, .* or leave out the optimizer for the weights alone"):
        script.restore(str(tmp_path / "run"), optimizer=second)
