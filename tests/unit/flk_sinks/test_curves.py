"""Which sinks a run has, and which run of theirs a job writes to."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import SinkName
from flk_runtime.errors import SetupError
from flk_runtime.training.lines import Lines
from flk_sinks.curves import Curves, _chosen, _is_installed
from flk_sinks.sink import RunInfo


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(user_env.JOB, "gpt")
    monkeypatch.setenv(pod_env.JOB_UID, "6f1c")
    return SimpleNamespace(
        options=SimpleNamespace(strategy="ddp"),
        rank_info=SimpleNamespace(attempt=2),
        rank=0,
        world_size=4,
        worker=0,
        workers=1,
        lines=Lines(0, 4),
        closing=[],
        page=SimpleNamespace(hold=0, restored=3),
        say=print,
    )


def opened(curves: Curves) -> RunInfo:
    curves.open([SinkName("tensorboard", "/tb")])
    assert curves._info is not None
    return curves._info


@pytest.mark.promise("Extensions: TensorBoard, MLflow and W&B have one curve through faults")
def test_all_attempts_of_a_job_have_one_run(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = opened(Curves(context)), opened(Curves(context))
    assert first.id == second.id
    assert first.id.startswith("gpt-")
    assert (first.name, first.settings["restarts"], first.settings["world_size"]) == ("gpt", 2, 4)
    monkeypatch.setenv(pod_env.JOB_UID, "another job of this name")
    assert opened(Curves(context)).id != first.id


def test_each_worker_of_diloco_has_a_run_of_its_own(context: Any) -> None:
    context.worker, context.workers = 1, 4
    info = opened(Curves(context))
    assert info.id.endswith("-worker-1")
    assert (info.name, info.settings["worker"]) == ("gpt-worker-1", 1)
    assert info.id == f"{info.group}-worker-1"


def test_a_hyperparameter_whose_name_looks_like_a_secret_is_not_shown(context: Any) -> None:
    """Its value may come from a file, so that no variable and no argument has it."""
    curves = Curves(context)
    info = opened(curves)
    curves.describe(
        {"hub": {"api_key": "canary-8d1c", "token": None}, "max_token": 512, "pad_token": "<pad>", "tokenizer": "bpe"}
    )
    shown = {"hub/api_key": "***", "hub/token": "None", "max_token": 512, "pad_token": "<pad>", "tokenizer": "bpe"}
    assert info.hyperparameters == shown


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
    assert _chosen(None, {}) == ()
    assert [each.kind for each in _chosen(None, variables)] == ["mlflow", "wandb"]
    variables["FLK_METRICS"] = "tensorboard:/tb"
    assert _chosen(None, variables) == (("tensorboard", "/tb"),)
    assert _chosen("mlflow", variables) == (("mlflow", ""),)
    assert _chosen("none", variables) == _chosen("", variables) == ()


def test_an_implied_sink_that_is_not_installed_is_left_out(installed: set[str]) -> None:
    installed.discard("wandb")
    assert _chosen(None, {"WANDB_PROJECT": "p"}) == ()


def test_a_sink_that_is_named_and_cannot_work_is_refused(installed: set[str]) -> None:
    installed.discard("wandb")
    with pytest.raises(SetupError) as caught:
        _chosen("wandb", {"RANK": "0"})
    assert str(caught.value) == (
        "metrics: wandb needs the package wandb, which this image lacks: add --pip wandb, or install it in the image"
    )
    with pytest.raises(SetupError, match="FLK_METRICS: mlflow needs the address of its server in MLFLOW_TRACKING_URI"):
        _chosen(None, {"FLK_METRICS": "mlflow"})
    with pytest.raises(SetupError, match="FLK_METRICS=neptune: expected tensorboard:/PATH"):
        _chosen(None, {"FLK_METRICS": "neptune"})


def test_wandb_without_a_key_asks_for_none_in_a_terminal(
    installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ask from a thread, while the training goes on."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(SetupError, match="metrics: wandb needs a key in WANDB_API_KEY, or WANDB_MODE=offline"):
        _chosen("wandb", {"WANDB_MODE": "online"})
    assert _chosen(None, {"WANDB_PROJECT": "p"}) == ()
    for enough in ({"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"NETRC": "/secrets/netrc"}):
        assert [each.kind for each in _chosen("wandb", enough)] == ["wandb"]
    monkeypatch.setattr(sys, "stdin", None)
    assert [each.kind for each in _chosen("wandb", {})] == ["wandb"]


def test_the_folder_that_wandb_writes_to_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_of_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("folder_of_runs") is not None
    assert not _is_installed("folder_of_runs")
    assert _is_installed("tensorboard")
