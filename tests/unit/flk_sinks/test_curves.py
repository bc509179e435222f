"""Which run of the sinks a job writes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import SinkName
from flk_runtime.training.lines import Lines
from flk_sinks.curves import Curves
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
