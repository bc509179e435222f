"""What wakes the launcher's loop: signals, and events that the threads of the rendezvous post."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket

from flk_runtime.contract import ExitCode
from flk_runtime.launcher.rendezvous import Event

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def code_of_signal(number: int) -> int:
    """The exit code of a launcher that a signal has told to stop."""
    return int(ExitCode.INTERRUPTED) if number == signal.SIGINT else int(ExitCode.PREEMPTED)


class Wakeup:
    """A socket that becomes readable when a signal has come or a thread has posted an event."""

    def __init__(self) -> None:
        self.socket, self._alarm = socket.socketpair()
        for end in (self.socket, self._alarm):
            end.setblocking(False)
        self.signals: list[int] = []
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.starting = True

    def install(self) -> None:
        """Take the signals that end a launcher. As process 1 of a container it would not be ended by them otherwise."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._signalled)

    def post(self, event: Event) -> None:
        """Hand an event to the loop, from any thread."""
        self.events.put(event)
        self._ring()

    def clear(self) -> None:
        """Make the socket quiet again, before signals and events are looked at."""
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(4096):
                pass

    def _signalled(self, number: int, frame: object) -> None:
        if self.starting:  # there are no ranks and no promises yet
            os._exit(code_of_signal(number))
        self.signals.append(number)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop will wake up anyway
            self._alarm.send(b"\0")
