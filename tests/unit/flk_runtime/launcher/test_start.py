"""The entry point of the launcher: what is left of one that ends in an unexpected way."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.failure import Kind
from flk_runtime.contract.record import JobRecord
from flk_runtime.launcher import start


class Ended(BaseException):
    """Takes the place of os._exit."""


@pytest.mark.parametrize("place", ["from_environment", "_run"])
def test_any_exception_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise RuntimeError("no reason: hunter2hunter2")

    def end(code: int) -> NoReturn:
        raise Ended(code)

    variables = {
        user_env.JOB: "gpt",
        user_env.POD_NAME: "gpt-worker-0",
        pod_env.TERMINATION_LOG: str(tmp_path / "log"),
        "API_TOKEN": "hunter2hunter2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "Wakeup", lambda: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(start.Settings if place == "from_environment" else start, place, fail)
    monkeypatch.setattr(start.os, "_exit", end)
    with pytest.raises(Ended) as caught:
        start.main(["train.py"])
    assert caught.value.args == (ExitCode.ERROR,)
    record = JobRecord.from_json((tmp_path / "log").read_text())
    assert record is not None
    assert (record.outcome, record.code) == ("failed", ExitCode.ERROR)
    assert record.failure is not None
    assert (record.failure.kind, record.failure.type) == (Kind.EXCEPTION, "RuntimeError")
    assert record.failure.message == "no reason: ***"
    assert capsys.readouterr().err.splitlines()[-1] == "RuntimeError: no reason: ***"


def test_a_thread_that_ends_with_an_exception_says_so_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NoReturn:
        raise ValueError("no reason: hunter2hunter2")

    lines: list[str] = []
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    start._tell_of_threads(lines.append, ["hunter2hunter2"])
    thread = threading.Thread(target=fail, name="telemetry")
    thread.start()
    thread.join()
    assert lines[0] == "the thread telemetry has ended with an exception, which is a bug in flk:"
    assert lines[-1] == "ValueError: no reason: ***"
    assert any("in fail" in line for line in lines)
    assert "hunter2" not in "".join(lines)
