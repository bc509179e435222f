"""What a run does without the packages of extensions."""

from __future__ import annotations

import pytest
import torch

from flk_runtime.contract import user_env
from flk_runtime.discovery import RankInfo
from flk_runtime.errors import SetupError
from flk_runtime.training import extensions
from flk_runtime.training.process import current


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "find_spec", lambda package: None)
    monkeypatch.delenv(user_env.METRICS, raising=False)


def choose(strategy: str) -> str:
    return extensions.choose(strategy, RankInfo(), torch.device("cpu"), 1.0)


def test_an_extension_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError, match="strategy auto needs the package flk_plan"):
        choose("auto")
    with pytest.raises(SetupError, match="strategy diloco needs the package flk_diloco"):
        extensions.outer("diloco", None)
    with pytest.raises(SetupError, match="metrics needs the package flk_sinks"):
        extensions.recording("tensorboard:/tmp/curves")
    monkeypatch.setenv(user_env.METRICS, "mlflow")
    with pytest.raises(SetupError, match="metrics needs the package flk_sinks"):
        extensions.recording(None)


def test_the_first_training_of_a_process_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_env.VERIFY, "2")
    with pytest.raises(SetupError, match="--verify needs the package flk_verify"):
        extensions.verify("ddp", RankInfo(), 1.0)
    monkeypatch.setattr(current, "training", object())
    extensions.verify("ddp", RankInfo(), 1.0)
