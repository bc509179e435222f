"""Which sinks a run has: those of the argument, of FLK_METRICS, or those that other variables imply."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flk_runtime.errors import SetupError
from flk_sinks.choice import _is_installed, chosen_sinks


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are found."""
    found: set[str] = {"tensorboard", "mlflow", "wandb"}

    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin="there") if name in found else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return found


def test_the_argument_wins_over_the_variable_and_this_over_others(installed: set[str]) -> None:
    variables = {"WANDB_PROJECT": "p", "MLFLOW_TRACKING_URI": "http://mlflow"}
    assert chosen_sinks(None, {}) == ()
    assert [each.kind for each in chosen_sinks(None, variables)] == ["mlflow", "wandb"]
    variables["FLK_METRICS"] = "tensorboard:/tb"
    assert chosen_sinks(None, variables) == (("tensorboard", "/tb"),)
    assert chosen_sinks("mlflow", variables) == (("mlflow", ""),)
    assert chosen_sinks("none", variables) == chosen_sinks("", variables) == ()


def test_an_implied_sink_that_is_not_installed_is_left_out(installed: set[str]) -> None:
    installed.discard("wandb")
    assert chosen_sinks(None, {"WANDB_PROJECT": "p"}) == ()


def test_a_sink_that_is_named_and_cannot_work_is_refused(installed: set[str]) -> None:
    installed.discard("wandb")
    with pytest.raises(SetupError) as caught:
        chosen_sinks("wandb", {"RANK": "0"})
    assert str(caught.value) == (
        "metrics: wandb needs the package wandb, which this image lacks: add --pip wandb, or install it in the image"
    )
    with pytest.raises(SetupError, match="FLK_METRICS: mlflow needs the address of its server in MLFLOW_TRACKING_URI"):
        chosen_sinks(None, {"FLK_METRICS": "mlflow"})
    with pytest.raises(SetupError, match="FLK_METRICS=neptune: expected tensorboard:/PATH"):
        chosen_sinks(None, {"FLK_METRICS": "neptune"})


def test_the_folder_that_wandb_writes_to_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("folder_of_runs") is not None
    assert not _is_installed("folder_of_runs")
    assert _is_installed("tensorboard")
