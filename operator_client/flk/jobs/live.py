"""LiveJob: what a live view shows of one job, read by threads, so that a slow answer holds up no key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from flk.errors import FlkError, JobNotFoundError, UnreachableError
from flk.jobs.state import Phase, State
from flk.jobs.wait import follow_states
from flk.observe.client import JobClient
from flk_runtime.contract.telemetry import Telemetry

EVERY: Final = 2.0  # seconds between two reads of the telemetry
EVERY_LOG: Final = 15.0  # where no launcher answers, so that the end of a log is read
SHARE: Final = 5  # and at least so many times the duration of the last one
Read = Callable[[JobClient, str], "tuple[Telemetry, str]"]


class LiveJob:
    """The state of a job, its telemetry and what has changed in it, as read last. Threads renew them until `close`."""

    def __init__(self, client: JobClient, name: str, state: State, read: Read) -> None:
        """``read`` returns the telemetry of a job, and why its ranks are not in it."""
        self._client, self._name, self._read = client, name, read
        self.state = state
        self.telemetry: Telemetry | None = None
        self.missing = ""
        self.error: FlkError | None = None  # that has ended the view
        self._outage: tuple[float, str] | None = None  # since when the API server does not answer, and its error
        self._closed = threading.Event()
        self.changed = threading.Event()

    def start(self) -> None:
        """Start to read."""
        for each in (self._follow, self._measure):
            threading.Thread(target=each, daemon=True, name=f"flk-top{each.__name__}").start()

    def close(self) -> None:
        """End the threads, those that wait for an answer after it."""
        self._closed.set()

    @property
    def outage(self) -> str:
        """A line about an API server that does not answer; empty if it does."""
        outage = self._outage  # which the threads change
        if outage is None:
            return ""
        return f"no answer for {time.monotonic() - outage[0]:.0f} s, this is the last one: {outage[1]}"

    def _follow(self) -> None:
        try:
            for state in follow_states(self._client, self._name):
                self.note_state(state)
                if self._closed.is_set():
                    return
        except JobNotFoundError:
            self.note_state(replace(self.state, phase=Phase.DELETED, reason="Deleted", message="it was deleted"))
        except FlkError as error:
            self.error = error
        self.changed.set()

    def note_state(self, state: State) -> None:
        """Take a new state."""
        self.state, self._outage = state, None
        self.changed.set()

    def _measure(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            if not self.state.finished:
                try:
                    self.telemetry, self.missing = self._read(self._client, self._name)
                    self._outage = None
                except FlkError as error:
                    self.missing = str(error)
                    silent = isinstance(error, UnreachableError)
                    self._outage = (self._outage or (time.monotonic(), str(error))) if silent else None
                self.changed.set()
            every = EVERY_LOG if self.missing else EVERY
            self._closed.wait(max(every, SHARE * (time.monotonic() - began)))
