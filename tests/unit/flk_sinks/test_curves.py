"""Which run of the sinks a job writes to."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.options import SinkName
from flk_runtime.run.lines import Lines
from flk_sinks.curves import Curves
from flk_sinks.sink import Row, RunInfo


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


def test_a_job_that_is_resumed_has_the_run_of_the_checkpoint(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Curves(context)
    state = one.state_dict()
    monkeypatch.setenv(user_env.JOB, "other")
    other = Curves(context)
    assert other.state_dict() != state
    other.load_state_dict(state)
    assert opened(other).id == opened(one).id
    assert opened(other).name == "other"


def test_each_worker_of_diloco_has_a_run_of_its_own(context: Any) -> None:
    context.worker, context.workers = 1, 4
    info = opened(Curves(context))
    assert info.id.endswith("-worker-1")
    assert (info.name, info.settings["worker"]) == ("gpt-worker-1", 1)
    assert info.id == f"{info.group}-worker-1"


class Kept:
    """A writer that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def put(self, row: Row) -> None:
        self.rows.append(row)

    def waiting(self) -> list[Row]:
        return []

    def end(self, ended: str, timeout: float) -> None: ...

    def wait(self, patience: float = 0.0) -> None: ...


def test_rows_of_a_checkpoint_stay_until_a_sink_gets_them(context: Any) -> None:
    """An attempt may save, and be killed, before its first line of metrics; or end without one."""
    row = Row(3, 1.5, {"loss": 2.0})
    state = {"id": "gpt-1", "waiting": json.dumps([row]), "dropped": "[]"}
    for _ in range(2):
        curves = Curves(context)
        curves.load_state_dict(state)
        state = curves.state_dict()
    assert json.loads(state["waiting"]) == [[3, 1.5, {"loss": 2.0}]]
    opened(curves)
    writer = Kept()
    curves._writers = {"tensorboard": writer}  # type: ignore[dict-item]
    curves.close()
    assert writer.rows == [row]
    assert json.loads(curves.state_dict()["waiting"]) == []


def test_rows_that_a_checkpoint_has_no_room_for_are_told_at_the_resume(
    context: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Kept()
    monkeypatch.setattr(slow, "waiting", lambda: [Row(step, 0.0, {"loss": 1.0}) for step in range(103)])
    curves = Curves(context)
    curves._writers = {"mlflow": slow}  # type: ignore[dict-item]
    Curves(context).load_state_dict(curves.state_dict())
    told = "the sinks were so slow before the resume that they may lack 3 lines of metrics, steps 0-2\n"
    assert capsys.readouterr().out == told


def test_a_hyperparameter_whose_name_looks_like_a_secret_is_not_shown(context: Any) -> None:
    """Its value may come from a file, so that no variable and no argument has it."""
    curves = Curves(context)
    info = opened(curves)
    curves.describe(
        {"hub": {"api_key": "canary-8d1c", "token": None}, "max_token": 512, "pad_token": "<pad>", "tokenizer": "bpe"}
    )
    shown = {"hub/api_key": "***", "hub/token": "None", "max_token": 512, "pad_token": "<pad>", "tokenizer": "bpe"}
    assert info.hyperparameters == shown
