"""Which place each training of a process has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flk_runtime.run import places


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_places", [])
    monkeypatch.setattr(places, "_holder", None)


def begin(name: str | None, *, keeps: bool = True) -> tuple[str | None, bool]:
    place, in_memory = places.of_next_training(name)
    places.at(name).trainings += 1
    if keeps:
        places.hold_memory(place)
    return place, in_memory


def test_a_later_training_in_a_place_has_a_folder_of_its_own_by_its_number(tmp_path: Path) -> None:
    place = str(tmp_path / "checkpoints")
    assert [begin(name)[0] for name in (place, f"{place}/", str(tmp_path / "other"), place)] == [
        place,
        f"{place}/training-1",
        str(tmp_path / "other"),
        f"{place}/training-2",
    ]
    names = [begin("s3://bucket/prefix/")[0] for _ in range(2)]
    assert names == ["s3://bucket/prefix/", "s3://bucket/prefix/training-1"]


def test_the_memory_of_the_pods_is_for_the_first_training_that_keeps_its_state(tmp_path: Path) -> None:
    place = str(tmp_path)
    assert begin(place, keeps=False) == (place, True)
    assert begin(place) == (f"{place}/training-1", True)
    assert begin(place) == (f"{place}/training-2", False)
    assert places.has_memory(f"{place}/training-1/")


def test_without_a_place_only_the_first_training_is_kept() -> None:
    assert [begin(None) for _ in range(2)] == [(None, True), (None, False)]


def test_another_optimizer_in_a_place_is_found_by_its_name(tmp_path: Path) -> None:
    place, parameters = places.at(str(tmp_path)), [torch.nn.Parameter(torch.ones(1))]
    first, second = (torch.optim.SGD(parameters, lr=0.1) for _ in range(2))
    place.trains({"optimizer": first, "progress": {}})
    assert place.other_optimizer({"optimizer": first, "progress": {}, "new": second}) is None
    assert place.other_optimizer({"progress": {}, "optimizer": second}) == "optimizer"
    del first
    assert place.other_optimizer({"optimizer": second}) == "optimizer"
