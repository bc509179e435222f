"""RunOptions: arguments win over the environment, which wins over the defaults; what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from flk_runtime.discovery import discover
from flk_runtime.errors import SetupError
from flk_runtime.system.torch_version import check_torch
from flk_runtime.training.options import TIMEOUT, RunOptions


def read(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **given: Any) -> RunOptions:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return RunOptions.read(discover(), {"device": "cpu", **given})


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"FLK_SEED": "3", "FLK_KEEP": "5", "FLK_SAVE_EVERY": "7", "FLK_CHECKPOINT": "/there"}
    found = read(environment, monkeypatch, seed=4, keep=0)
    assert (found.seed, found.keep, found.save_every, found.checkpoint) == (4, 1, 7, "/there")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"seed": -1}, "seed=-1: expected an integer, 0 or more"),
        ({"save_every": "often"}, "save_every=often: expected a number of steps from 0 to 2147483647"),
        ({"keep": 1.5}, "keep=1.5: expected an integer"),
        ({"log_every": True}, "log_every=True: expected an integer"),
        ({"strategy": 3}, "strategy=3: expected a name, or options such as flk_diloco.DiLoCo"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SetupError) as caught:
        read({}, monkeypatch, **given)
    assert str(caught.value) == expected


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_torch, "__defaults__", ("2.5.1",))
    with pytest.raises(SetupError, match=r"torch 2\.5\.1 is too old"):
        read({}, monkeypatch)


def test_sinks_are_chosen_except_in_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read({}, monkeypatch, metrics="tensorboard:/tb").begin_recording
    assert read({"FLK_METRICS": "tensorboard:/tb", "FLK_TRIAL": "1"}, monkeypatch).begin_recording is None


def test_collectives_of_a_trial_wait_for_the_process_that_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read({}, monkeypatch, timeout=60.0).timeout == 60.0
    assert read({"FLK_TRIAL": "1"}, monkeypatch, timeout=60.0).timeout == TIMEOUT
