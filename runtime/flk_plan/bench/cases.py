"""Cases: each rank runs the same program in a process of its own; the ranks begin together and end together.

They meet in a store. A case that fails on one rank is ended on all of them.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract.failure import kind_of_text
from flk_runtime.contract.pod_layout import free_ports
from flk_runtime.discovery import RankInfo
from flk_runtime.shared.progress import heartbeat
from flk_runtime.system import trial
from flk_runtime.system.text import last_line

_MODULE: Final = "flk_plan.bench.script"
_POLL: Final = 0.1  # seconds
_GRACE: Final = 3.0  # seconds
_OTHER: Final = "another rank failed"
_LINES: Final = 200  # of a failed case's output that are shown


@dataclass(frozen=True)
class Ended:
    """The end of a case on one rank: the result that it has written, or the error; and its output."""

    result: Any
    error: str
    output: list[str]


class Cases:
    """Runs cases one after the other. All ranks make the same calls."""

    def __init__(self, info: RankInfo, store: Any, timeout: float) -> None:
        """``timeout`` is the time in seconds that a case may take."""
        self._info, self._store, self._timeout = info, store, timeout
        self._number = 0

    def run(self, request: dict[str, Any], command: list[str], variables: dict[str, str]) -> Ended:
        """Run ``command``, a script, by `flk_plan.bench.script` with this request. Collective."""
        self._number += 1
        (port,), *_ = self.gather(f"port-{self._number}", free_ports(1))
        environment = trial.trial_environment() | variables | {"MASTER_PORT": str(port)}
        failed = f"failed-{self._number}"
        with tempfile.TemporaryDirectory(prefix="flk-") as folder:
            result, output = Path(folder, "result.json"), Path(folder, "output")
            with output.open("wb") as sink:
                process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, json.dumps(request | {"output": str(result)}), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                )
                error = self._wait(process, failed)
            lines = output.read_text(errors="replace").splitlines()
            found = json.loads(result.read_text()) if result.exists() else None
        if found is not None:
            error = found.get("error", "")
        elif not error:
            error = _reason(process.returncode, lines)
        if error:
            self._store.set(failed, "")
        errors = self.gather(f"ended-{self._number}", error)
        if any(errors):
            return Ended(None, first_cause(errors), lines[-_LINES:])
        return Ended(found, "", lines)

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks. Collective."""
        keys = [f"{name}/{rank}" for rank in range(self._info.world_size)]
        self._store.set(keys[self._info.rank], json.dumps(value))
        self._store.wait(keys, timedelta(seconds=self._timeout + 60))
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, process: subprocess.Popen[bytes], failed: str) -> str:
        """Wait until the process ends, on this rank or, with a failure, on another one. Returns why it was ended."""
        deadline, look_at = time.monotonic() + self._timeout, 0.0
        error = ""
        while process.poll() is None:
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 1.0
                heartbeat()  # a case that hangs has a limit of its own
                error = _OTHER if self._store.check([failed]) else ""
            if now > deadline:
                error = f"it took longer than {self._timeout:g} s"
            if error:
                error = "" if error == _OTHER and _ends_by_itself(process) else error
                _end(process)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
        return error


def first_cause(errors: Sequence[str]) -> str:
    """The error of the first rank that has failed by itself: not because its connections to another one broke."""
    ranks = [rank for rank, error in enumerate(errors) if error]
    first = min(ranks, key=lambda rank: (errors[rank] == _OTHER, _is_secondary(errors[rank]), rank))
    return f"rank {first}: {errors[first]}"


def _is_secondary(error: str) -> bool:
    """Whether an error, such as ``exit code 1: RuntimeError: text``, says that the connection to another rank broke."""
    name, _, message = error.partition(": ")[2].partition(": ")
    return kind_of_text(name.rpartition(".")[2], message).meaning.secondary


def _ends_by_itself(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process ends within some seconds, so that its own error is known."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    return process.poll() is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3.0)
    process.kill()  # nothing, if it has ended
    process.wait()


def _reason(code: int, lines: list[str]) -> str:
    """Why a process without a result has ended."""
    if code == -signal.SIGKILL:
        return "it was killed, as the kernel does when memory is used up"
    last = re.sub(r"^\[rank\d+\]: ", "", last_line(lines))  # torch.distributed's hook for exceptions prefixes each line
    return f"exit code {code}: {last[:200]}" if code >= 0 else f"{signal.Signals(-code).name}: {last[:200]}"
