"""The hub's process among the children of the launcher, which ends processes that it does not know."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

from flk_runtime.launcher.hub import HubProcess
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host


def test_a_hub_that_is_just_starting_is_not_taken_for_a_process_that_ranks_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = host.children()
    started, may_return, popen = threading.Event(), threading.Event(), subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        """Start a process in the place of the hub, and be slow to return it."""
        process = popen(["sleep", "600"], **options)
        started.set()
        may_return.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    hub = HubProcess(Settings(("train.py",), hub_port=1), {}, lambda text: None)
    started.wait()
    kept = []

    def keep() -> set[int]:
        may_return.set()
        kept.extend(hub.pids())
        return before | set(kept)

    assert host.kill_adopted(keep, spare_trackers=False) == 0
    assert kept == list(host.children() - before), "it runs"
    hub.close(1)
