"""Processes that tests start: their results and ends, and waiting for their effects."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PATIENCE = 120.0  # seconds for something to happen on a machine that does other things too


class Result(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def checked(command: Sequence[str], stdin: str | None = None, timeout: float = 120, cwd: Path | None = None) -> str:
    """Run a command that must succeed, and return its stdout."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def until(
    condition: Callable[[], Any],
    what: str,
    seconds: float = PATIENCE,
    every: float = 0.02,
    slowest: float = 0.0,
    context: Callable[[], str] = str,
) -> Any:
    """Wait until a condition returns a true value, and return the value.

    The condition is asked ``every`` so many seconds, and less often the longer it lasts, down to every ``slowest``
    seconds. Fails the test after ``seconds``, with ``what`` and what ``context`` returns then (the logs, for instance).
    """
    start = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - start
        if waited > seconds:
            pytest.fail(f"did not happen in {seconds:g} s: {what}\n{context()}", pytrace=False)
        time.sleep(max(every, min(waited / 10, slowest)))
    return found


def alive(pid: int) -> bool:
    """Whether this process exists and is not a zombie."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the process's state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
