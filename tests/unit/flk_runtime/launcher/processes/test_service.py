"""The service's process among the children of the launcher, which ends processes that it does not know."""

from __future__ import annotations

import errno
import subprocess
import threading
from typing import Any

import pytest

from flk_runtime.launcher.processes import service as service_module
from flk_runtime.launcher.processes.service import Service
from flk_runtime.launcher.settings import Settings
from flk_runtime.system import host


def test_a_service_that_is_just_starting_is_not_taken_for_a_process_that_ranks_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = host.children()
    started, may_return, popen = threading.Event(), threading.Event(), subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        """Start a process in the place of the service, and be slow to return it."""
        process = popen(["sleep", "600"], **options)
        started.set()
        may_return.wait(60)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    service = Service(Settings(("train.py",), service="a_module"), {}, lambda text: None)
    service.start()
    kept = []

    def keep() -> set[int]:
        may_return.set()
        kept.extend(service.pids())
        return before | set(kept)

    try:
        assert started.wait(60)
        assert host.kill_adopted(keep, spare_trackers=False) == 0
        assert kept == list(host.children() - before), "it runs"
    finally:
        may_return.set()
        service.pids()  # it has started
        service.close(1)


def test_a_service_that_cannot_start_or_ends_is_started_again_and_has_no_process_id_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, runs, popen = threading.Event(), threading.Event(), subprocess.Popen
    programs = iter(["", "true", "cat"])
    told: list[tuple[str, list[int]]] = []

    def start(command: list[str], **options: Any) -> Any:
        """Fail as at a limit of processes, start a process that ends, and then one that goes on."""
        assert made.wait(60)
        program = next(programs)
        if not program:
            raise BlockingIOError(errno.EAGAIN, "no process")
        if program == "cat":
            runs.set()
        return popen([program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(service_module, "_RESTART_DELAY", 0)
    service = Service(Settings(("train.py",), service="a_module"), {}, lambda text: told.append((text, service.pids())))
    service.start()
    made.set()
    try:
        assert runs.wait(60)
        assert told == [
            ("cannot start the service a_module: no process; trying again", []),
            ("the service a_module has ended; starting it again", []),
        ]
        assert len(service.pids()) == 1
    finally:
        service.close(1)
