"""The program that a rank's observer executes: it profiles the next steps of the rank and says where the trace is.

The profiler begins and ends between two steps, in the thread that trains, as torch demands. The trace is written by
another thread while the training goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any, Final

from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import torch_private

_POLL: Final = 0.1  # seconds between two looks whether the profile goes on


def serve(connection: socket.socket, page: ProgressPage, arguments: dict[str, Any]) -> None:
    """Answer on ``connection`` with a line of JSON at once and one at the end, which has ``error`` or ``files``.

    ``arguments``: ``rank``, ``steps``, ``timeout`` (seconds without a step), and ``folder`` of the files.
    Nothing is left behind if the connection ends before.
    """
    with connection, contextlib.suppress(OSError):
        _send(connection, {"begun": True})
        _send(connection, _answer(connection, page, arguments))


def _answer(connection: socket.socket, page: ProgressPage, arguments: dict[str, Any]) -> dict[str, Any]:
    if int(os.environ.get("RANK", "-1")) != arguments["rank"]:
        return {"error": "absent"}
    other = getattr(page.on_step, "__self__", None)
    if other is not None and not other.left:
        return {"error": "busy"}
    if "torch" not in sys.modules:
        return {"error": "no torch"}
    if torch_private.is_profiled():
        return {"error": "profiled"}
    profile = Profile(page, arguments)
    try:
        return profile.run(connection)
    except Exception as error:  # of any kind: the user gets it, the rank goes on
        return {"error": "failed", "detail": f"{type(error).__name__}: {error}"}


class Profile:
    """The profile of some steps of this rank."""

    def __init__(self, page: ProgressPage, arguments: dict[str, Any]) -> None:
        import torch.profiler

        self._page, self._arguments = page, arguments
        self._steps: int = arguments["steps"]
        self._boundaries = 0  # ends of steps so far: the first warms up, the second begins the trace
        self._last = time.monotonic()  # the latest one, or the start
        self.left = False  # nobody waits for the profile any more
        self._done = False
        self._failure = ""
        self._began_at = -1
        self._lock = threading.Lock()  # of the state, between the thread that trains and the one that waits
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=lambda _: None,
        )

    def run(self, connection: socket.socket) -> dict[str, Any]:
        """Wait for the steps, write the files, and return the answer."""
        self._page.on_step = self._after_step
        while not self._done and not self._failure:
            time.sleep(_POLL)
            with self._lock:
                silent = time.monotonic() - self._last
                if not self._done and (silent > self._arguments["timeout"] or _is_closed(connection)):
                    self.left = True  # the thread that trains ends the profiler, after its next step
                    measured, made = max(0, self._boundaries - 2), self._page.step
                    return {"error": "no steps", "made": made, "measured": measured, "seconds": round(silent)}
        if self._failure:
            return {"error": "failed", "detail": self._failure}
        return {"files": self._write()}

    def _after_step(self) -> None:
        """Do what is due between two steps. An error ends the profile and not the training."""
        with self._lock:
            try:
                self._advance()
            except Exception as error:
                self._page.on_step = None
                self._failure = f"{type(error).__name__}: {error}"
            self._last = time.monotonic()

    def _advance(self) -> None:
        self._boundaries += 1
        if self.left:
            self._page.on_step = None
            if self._boundaries > 1:
                self._profiler.stop()
        elif self._boundaries == 1:
            self._profiler.start()
        else:
            if self._boundaries == 2:
                self._began_at = self._page.step
            self._profiler.step()
            if self._boundaries == self._steps + 2:
                self._page.on_step = None
                self._done = True

    def _write(self) -> list[str]:
        """Write the trace, and return its path."""
        path = os.path.join(self._arguments["folder"], f"profile-{os.getpid()}-{self._began_at}.json.gz")
        self._profiler.export_chrome_trace(path)
        return [path]


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed the connection, on which it sends nothing after its request."""
    return bool(select.select([connection], [], [], 0)[0])


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")
