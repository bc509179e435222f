"""What reaches the launcher from outside of its loop: signals, events of threads, and questions of processes.

A process in the pod asks the launcher for the stacks of all ranks, or for the telemetry: ``python -m flk_runtime
stacks``, in the same container, prints the stacks as JSON; `flk stacks` runs it in a pod. ``metrics`` in the place of
``stacks`` prints the telemetry of the job. Both find the launcher by a Unix socket in the launcher's folder, and write
the name of the question as one line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flk_runtime.contract import ExitCode
from flk_runtime.system import host
from flk_runtime.wire import serve

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def exit_code_of_signal(number: int) -> int:
    """Exit code of a launcher that this signal has stopped."""
    return int(ExitCode.INTERRUPTED) if number == signal.SIGINT else int(ExitCode.PREEMPTED)


class Wakeup:
    """A socket that becomes readable when a signal has arrived or a thread has posted an event."""

    def __init__(self) -> None:
        self.socket, self._write_end = self.ends = socket.socketpair()
        for end in self.ends:
            end.setblocking(False)
        self.signals: list[int] = []
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # an `Event` of launcher.transport.messages each
        self.group = 0  # of the latest command that has prepared the pod; 0: there was none
        self.starting = True  # while it is true, a signal ends the process at once

    def install(self) -> None:
        """Handle the launcher's signals, but for a SIGHUP that nohup has it ignore.

        Process 1 of a container ignores signals without a handler.
        """
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def post(self, event: Any) -> None:
        """Add an event, from any thread."""
        self.events.put(event)
        self.wake()

    def clear(self) -> None:
        """Make the socket unreadable again. Call before reading ``signals`` and ``events``."""
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def _handle(self, number: int, frame: object) -> None:
        if self.starting:  # there are no ranks yet
            if self.group:
                host.kill_group(self.group)
            os._exit(exit_code_of_signal(number))
        self.signals.append(number)
        self.wake()

    def wake(self) -> None:
        """Make the socket readable, from any thread."""
        with contextlib.suppress(BlockingIOError):  # the socket's buffer is full, so the loop wakes up anyway
            self._write_end.send(b"\0")


@dataclass(frozen=True)
class ThreadFailed:
    """A thread ended with an exception, which is a bug in flk."""

    error: BaseException


def start_thread(name: str, function: Callable[[], None], post: Callable[[ThreadFailed], None]) -> None:
    """Run ``function`` in a daemon thread, and post ThreadFailed if it raises."""
    threading.Thread(target=posting(function, post), name=name, daemon=True).start()


def posting(function: Callable[..., None], post: Callable[[ThreadFailed], None]) -> Callable[..., None]:
    """The function of a thread, which posts ThreadFailed where ``function`` raises."""

    def run(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            post(ThreadFailed(error))

    return run


FOLDER_PREFIX: Final = "flk-"  # of the launcher's temporary folder
_SOCKET: Final = "control"
_TIMEOUT: Final = 30.0  # seconds in which the leader answers
_QUESTION_LIMIT: Final = 100  # bytes


class Control:
    """Answers processes that ask this launcher, in a thread for each."""

    def __init__(self, folder: str, ask: Mapping[str, Callable[[str], None]]) -> None:
        """``folder`` is the launcher's temporary folder. ``ask`` has a function for each question, by its name.

        It gets the name of the asker and asks the leader; `answer` gets what it answers.
        """
        self._ask = ask
        self._answers: dict[str, queue.SimpleQueue[dict[str, Any]]] = {}  # by the name under which the leader was asked
        self._numbers = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # a path that is too long
            self._listener.bind(os.path.join(folder, _SOCKET))
            self._listener.listen()
            arguments = self._listener, self._serve, "question"
            threading.Thread(target=serve, args=arguments, name="control", daemon=True).start()

    def answer(self, asker: str, found: dict[str, Any]) -> None:
        """Give what the leader has answered to its asker."""
        if answers := self._answers.get(asker):
            answers.put(found)

    def _serve(self, connection: socket.socket) -> None:
        """Read the question of a process, ask the leader, and send what it answers in time."""
        with connection, contextlib.suppress(OSError, queue.Empty):
            connection.settimeout(_TIMEOUT)
            question = connection.makefile(errors="replace").readline(_QUESTION_LIMIT).strip()
            if ask := self._ask.get(question):
                asker = str(next(self._numbers))
                answers = self._answers[asker] = queue.SimpleQueue()
                try:
                    ask(asker)
                    connection.sendall(json.dumps(answers.get(timeout=_TIMEOUT)).encode())
                finally:
                    del self._answers[asker]


def main(question: str) -> int:
    """Print what this container's launcher answers as JSON. Returns the exit code of the process."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{_SOCKET}")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT)
            connection.connect(str(path))
            connection.sendall(f"{question}\n".encode())
            with connection.makefile("rb") as file:
                data = file.read()
            if data:
                print(data.decode())
                return ExitCode.DONE
    print("no launcher of flk answers in this container; it may still be starting", file=sys.stderr)
    return ExitCode.NOT_FOUND
