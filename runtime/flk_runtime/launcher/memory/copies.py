"""Copies of this pod's parts for its partner, which are sent in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from flk_runtime.launcher.memory.connection import DataConnection, RefusedError, reason
from flk_runtime.launcher.memory.plan import Part
from flk_runtime.launcher.memory.store import PartStore
from flk_runtime.launcher.settings import Settings
from flk_runtime.system.part import PartError, read_length

_RETRY: Final = 0.2  # seconds between two tries to reach the partner
_PAUSE: Final = 30.0  # seconds after the partner could not be reached in which it is not tried again


class Copies:
    """Sends parts to the partner of one attempt, one after the other."""

    def __init__(
        self,
        settings: Settings,
        store: PartStore,
        partner: tuple[int, tuple[str, int]] | None,
        done: Callable[[Part, bool], None],
        log: Callable[[str], None],
    ) -> None:
        """``partner`` is its pod and address; None: there is none, and nothing is sent.

        ``done`` is called for each part, in the thread, when the partner has a copy (True) or cannot have one (False).
        """
        self._settings, self._store, self._partner = settings, store, partner
        self._done, self._log = done, log
        self._queue: queue.SimpleQueue[Part | tuple[int, int] | None] = queue.SimpleQueue()
        self._waiting = 0  # parts that are not done
        self._lock = threading.Lock()
        self._connection: DataConnection | None = None
        self._stopped = False
        self._unreachable_until = 0.0  # time.monotonic
        self._complained = False

    def run(self) -> None:
        """Send what `add` and `reserve` ask for, until `stop`."""
        while (item := self._queue.get()) is not None:
            if not isinstance(item, Part):
                self._exchange(lambda connection, item=item: self._reserve_now(connection, *item))  # type: ignore[misc]
                continue
            held = self._exchange(lambda connection, part=item: self._send(connection, part))  # type: ignore[misc]
            if not self._stopped:
                self._done(item, held)
            with self._lock:
                self._waiting -= 1
        self._disconnect()

    def add(self, part: Part) -> None:
        """Send a copy of a part that the store holds."""
        with self._lock:
            self._waiting += 1
        self._queue.put(part)

    def reserve(self, rank: int, size: int) -> None:
        """Have the partner make room for the parts of a rank."""
        if self._partner:
            self._queue.put((rank, size))

    @property
    def busy(self) -> bool:
        """Whether there are parts of which the partner may still get a copy."""
        return self._waiting > 0 and not self._stopped

    def stop(self) -> None:
        """End the thread, also in the middle of a part."""
        self._stopped = True
        self._queue.put(None)
        with self._lock:
            if self._connection:
                self._connection.interrupt()

    # In the thread -----------------------------------------------------------------------------------------------

    def _exchange(self, action: Callable[[DataConnection], bool]) -> bool:
        """Do something with a connection to the partner, and return what that returns; False: it is not reached.

        Tries again for the time of a lease, and then says why not.
        """
        if not self._partner or time.monotonic() < self._unreachable_until:
            return False
        deadline = time.monotonic() + self._settings.lease
        while not self._stopped:
            try:
                result = action(self._connect(self._partner[1]))
                self._complained = False
                return result
            except (OSError, PartError) as error:
                self._disconnect()
                if self._stopped:
                    return False
                if isinstance(error, RefusedError) or time.monotonic() >= deadline:
                    text = reason(error) if isinstance(error, OSError) else str(error)
                    self._complain(text, self._partner)
                    self._unreachable_until = time.monotonic() + _PAUSE
                    return False
                time.sleep(_RETRY)
        return False

    def _complain(self, why: str, partner: tuple[int, tuple[str, int]]) -> None:
        if not self._complained:
            self._complained = True
            pod, (host, port) = partner
            self._log(
                f"pod {pod} at {host}:{port} holds no copies of this pod's checkpoints: {why}; if this pod is lost, "
                "the job falls back to a checkpoint on its volume, or starts again"
            )

    def _connect(self, address: tuple[str, int]) -> DataConnection:
        if self._connection is None:
            connection = DataConnection.connect(address, self._settings)
            with self._lock:
                self._connection = connection
                if self._stopped:
                    connection.interrupt()
        return self._connection

    def _disconnect(self) -> None:
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = None

    def _reserve_now(self, connection: DataConnection, rank: int, size: int) -> bool:
        connection.send({"do": "reserve", "rank": rank, "size": size})
        _expect_ok(connection)
        return True

    def _send(self, connection: DataConnection, part: Part) -> bool:
        with self._store.reading(part) as path:
            if path is None:  # the step was given up
                return False
            length = read_length(path)
            connection.send({"do": "put", "part": part, "length": length})
            if not _expect_ok(connection).get("held"):
                connection.send_file(path, length)
                _expect_ok(connection)
            return True


def _expect_ok(connection: DataConnection) -> dict[str, object]:
    answer = connection.receive()
    if "error" in answer:
        raise RefusedError(str(answer["error"]))
    return answer
