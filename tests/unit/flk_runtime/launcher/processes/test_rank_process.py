"""The process of a rank: what it reports at its end, and what it waits for."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
import types
from typing import Any

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.processes import rank_process
from flk_runtime.launcher.processes.ranks import from_report


def test_the_text_of_an_exit_is_reported_by_the_rank_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(rank_process, "_reports", reports)
    monkeypatch.setattr(rank_process.failure_report, "exits_with_failure", False)
    assert rank_process._exit_code(SystemExit("no data"), reports=False) == 1
    assert reports == []
    assert rank_process._exit_code(SystemExit("no data"), reports=True) == 1
    found = from_report(Failure(Kind.EXCEPTION, 0, rank=1), json.dumps(reports.pop()).encode())
    assert found
    assert (found[0].kind, found[0].message, found[0].exit_code) == (Kind.EXIT, "no data", 1)


def test_a_file_that_another_thread_holds_for_ever_does_not_keep_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = threading.Event()
    monkeypatch.setattr(rank_process, "_flush_files", freed.wait)
    monkeypatch.setattr(rank_process, "_FLUSH_SECONDS", 0.01)
    assert not rank_process._flush()
    freed.set()
    assert rank_process._flush()


def test_a_module_that_is_missing_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("path", "argv", "orig_argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(rank_process, "_forget_shadowed", lambda folder: None)
    with pytest.raises(ModuleNotFoundError):
        rank_process._run(["-m", "no_such_module"])


def test_a_function_gets_a_module_when_the_script_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[types.ModuleType] = []
    monkeypatch.setattr(sys, "meta_path", [rank_process._AfterImport("colorsys", imported.append), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    module = importlib.import_module("colorsys")
    assert imported == [module]


def test_a_worker_that_ended_before_does_not_keep_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """signal.signal runs the former handler first, if the signal has come already."""
    actions: list[Any] = []

    def handle(number: int, action: Any) -> None:
        if len(actions) == 0:
            actions.append("raised")
            raise RuntimeError("DataLoader worker exited unexpectedly")
        actions.append(action)

    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setattr(signal, "signal", handle)
    assert rank_process._fail(ValueError("no data"), reports=False) == 1
    assert actions == ["raised", signal.SIG_DFL]
