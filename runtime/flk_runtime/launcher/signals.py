"""What wakes the launcher's loop: signals, events that threads of the rendezvous post, and exceptions of threads."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flk_runtime.contract.failure import ExitCode

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STACKS_SIGNAL: Final = signal.SIGQUIT  # prints the stacks of all ranks of the job, as a JVM prints its threads
HANDLED_SIGNALS: Final = (*STOP_SIGNALS, STACKS_SIGNAL)


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
        self.starting = True  # while it is true, a signal ends the process at once

    def install(self) -> None:
        """Handle the launcher's signals. Process 1 of a container ignores signals without a handler."""
        for number in HANDLED_SIGNALS:
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
            if number == STACKS_SIGNAL:
                return
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
