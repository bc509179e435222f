"""The processor time of a test run by the folders of its tests, in the terminal's summary.

A run with a cluster keeps all processors busy, so how long it takes is how much it computes. The time of a test is that
of pytest's process and of its children that have ended, and that of its fork servers with theirs. What runs in
containers is in none of them, but in the time of the machine, as is all else that the machine does meanwhile.
"""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
NAME = "processor time"
START = "starts and collection"


def used() -> float:
    """Processor time in seconds of this process, of its fork server, and of the children of both that have ended."""
    own = sum(os.times()[:4])
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009  # not in types
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return own
    return own + sum(map(int, fields[11:15])) / TICKS


def of_machine() -> float:
    """Processor time in seconds of all processes since the machine started; 0 where there is no /proc."""
    try:
        user, nice, system, _, _, interrupts, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    except OSError:
        return 0.0
    return (user + nice + system + interrupts + soft) / TICKS


class ProcessorTime:
    """A plugin of pytest, in the process that prints and in each worker."""

    def __init__(self) -> None:
        self._machine, self._before = of_machine(), 0.0
        self._folders = Counter[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called in the process that runs tests: a worker, or the only process."""
        self._before = used()
        self._folders[START] += self._before
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[NAME] = self._before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._folders[START] += getattr(node, "workeroutput", {}).get(NAME, 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        if call.when == "teardown":
            now = used()
            report.user_properties.append((NAME, now - self._before))
            self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._folders[report.nodeid.split("/")[1]] += sum(
                time for name, time in report.user_properties if name == NAME
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("processor time")
        for folder, seconds in self._folders.most_common():
            terminalreporter.line(f"{seconds:8.0f} s {folder}")
        terminalreporter.line(f"{of_machine() - self._machine:8.0f} s the machine, with containers and other programs")
