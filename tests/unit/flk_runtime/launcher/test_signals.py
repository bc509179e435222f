"""Threads of the launcher, and its signals."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
from typing import NoReturn

import pytest

from flk_runtime.launcher.control import ThreadFailed, Wakeup, start_thread


def test_the_loop_hears_of_the_exception_with_which_a_thread_ends() -> None:
    error = ValueError("a bug")

    def fail() -> None:
        raise error

    events: queue.SimpleQueue[ThreadFailed] = queue.SimpleQueue()
    start_thread("failing", fail, events.put)
    assert events.get(timeout=10).error is error


def test_a_signal_ends_the_command_that_prepares_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system does not show the children of a process."""

    def end(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr("flk_runtime.system.host.children", set)
    monkeypatch.setattr(os, "_exit", end)
    wakeup = Wakeup()
    with wakeup.ends[0], wakeup.ends[1], subprocess.Popen(["sleep", "600"], start_new_session=True) as command:
        wakeup.group = command.pid
        with pytest.raises(SystemExit):
            wakeup._handle(signal.SIGTERM, None)
    assert command.returncode == -signal.SIGKILL
