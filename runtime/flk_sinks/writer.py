"""Writer: the thread that writes the rows of a run to one sink; close() ends the threads of a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from flk_runtime.contract.quantities import numbered, plural
from flk_sinks.sink import Row, Sink

LIMIT: Final = 10_000  # rows that wait
_AT_ONCE: Final = 500  # rows in one write
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0  # seconds between two attempts to write
_LAST_TRY = 5.0  # seconds that the end of a run waits for a sink that fails


class Writer:
    """Writes rows to a sink, in a thread. `put` never waits and never raises.

    What a sink raises becomes one line, and is tried again. Rows above ``limit`` are dropped, the newest first.
    """

    def __init__(
        self, sink: Sink, say: Callable[[str], None], *, limit: int = LIMIT, first_delay: float = _FIRST_DELAY
    ) -> None:
        self._sink, self._say, self._limit, self._first_delay = sink, say, limit, first_delay
        self._rows: deque[Row] = deque()
        self._dropped = 0
        self._described = self._open = self._fails = False
        self._ended = ""  # how the run has ended, as `Sink.close` takes it
        self._timeout = 0.0  # seconds in which the run has to end
        self._until = 0.0  # when the process goes on without the thread, by time.monotonic
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, row: Row) -> None:
        """Have a row written."""
        if len(self._rows) >= self._limit:
            if not self._dropped:
                self._say(f"{self._sink.title} is too slow or away: {self._limit} lines wait, and new ones are dropped")
            self._dropped += 1
            return
        self._rows.append(row)
        if self._thread is None:  # a run without rows leaves nothing
            thread = threading.Thread(target=self._run, name=f"flk {self._sink.title}", daemon=True)
            with contextlib.suppress(RuntimeError):  # at a limit of processes, or at the end of this one: `end` writes
                thread.start()
                self._thread = thread
        self._wake.set()

    def describe(self) -> None:
        """Have the settings and hyperparameters of the run written again."""
        self._described = False
        self._wake.set()

    def end(self, ended: str, timeout: float) -> None:
        """Have what waits written and the run ended within ``timeout`` seconds. A second call does nothing."""
        if self._ended or not (self._thread or self._rows):
            return
        if self._fails:
            timeout = min(timeout, _LAST_TRY)
        self._timeout, self._until, self._ended = timeout, time.monotonic() + timeout, ended
        self._wake.set()
        if self._thread is None:
            self._run()

    def wait(self) -> None:
        """Wait for the end, and say which lines are not written then."""
        if self._thread:
            self._thread.join(max(0.0, self._until - time.monotonic()))
        rows = list(self._rows)
        if rows or (self._thread and self._thread.is_alive()):
            lines = f"{plural(len(rows), 'line')} of metrics may be missing"
            what = f"; {lines}, {numbered('step', (row.step for row in rows))}" if rows else ""
            self._say(f"{self._sink.title}: not all is written after {self._timeout:g} s{what}")

    def _run(self) -> None:
        delay = self._first_delay
        while not (self._ended and self._is_closed()):
            try:
                self._write()
            except Exception as error:
                self._open = self._described = False
                if not self._fails:
                    again = "; flk tries again, and training goes on"
                    self._say(f"{self._sink.title}: {type(error).__name__}: {_first_line(error)}{again}")
                self._fails = True
                self._pause(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
            else:
                if self._fails:
                    self._say(f"{self._sink.title} works again")
                self._fails, delay = False, self._first_delay
                if not self._ended:
                    self._wake.wait()
                    self._wake.clear()

    def _write(self) -> None:
        if not self._open:
            self._sink.open()
            self._open = True
        if not self._described:
            self._described = True
            self._sink.describe()
        while self._rows:
            rows = [self._rows[index] for index in range(min(len(self._rows), _AT_ONCE))]
            self._sink.write(rows)
            for _ in rows:
                self._rows.popleft()
        if self._dropped:
            self._say(f"{self._sink.title}: {plural(self._dropped, 'line')} of metrics were dropped")
            self._dropped = 0

    def _is_closed(self) -> bool:
        """Whether the thread may end: the sink is closed, or there is no time left."""
        if self._open and self._described and not self._rows:
            try:
                self._sink.close(self._ended)
            except Exception as error:
                self._say(f"{self._sink.title}: {type(error).__name__}: {_first_line(error)}")
            return True
        return time.monotonic() >= self._until

    def _pause(self, delay: float) -> None:
        """Wait before the next attempt; shorter, if the run ends meanwhile."""
        until = time.monotonic() + delay
        while not self._ended and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()
        if self._ended:
            time.sleep(min(self._first_delay, max(0.0, self._until - time.monotonic())))


def close(writers: Collection[Writer], ended: str, timeout: float) -> None:
    """Write what waits, and end the run in all sinks at once, within ``timeout`` seconds together."""
    for writer in writers:
        writer.end(ended, timeout)
    for writer in writers:
        writer.wait()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:300]
