"""Acceptor: accepts connections, has their other ends prove that they belong to the job, and hands those over.

Anybody on the network may connect. A stranger, who has not sent a frame with the right authentication code yet, costs a
descriptor and no thread. All of them together have the same limits at every listener of flk.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from flk_runtime.wire.connection import LEASE, Connection
from flk_runtime.wire.listener import accept
from flk_runtime.wire.registry import Registry
from flk_runtime.wire.session import Session
from flk_runtime.wire.stream import Stream, reason

M = TypeVar("M")
HANDSHAKE: Final = 10.0  # seconds in which an end must have proved that it belongs to the job, however busy it is
STRANGERS: Final = 256  # open connections whose ends have not; the oldest is closed for a new one
LOG_INTERVAL: Final = 10.0  # seconds between two lines about connections that were refused
_POLL: Final = 1.0  # seconds after which it notices at the latest that it is closed


@dataclass(eq=False)
class _Stranger(Generic[M]):
    connection: Connection[M]
    address: str
    deadline: float  # by time.monotonic


class Acceptor(Generic[M]):
    """Serves one listening socket. `refuse` and `close` may be called in any thread."""

    def __init__(
        self,
        listener: socket.socket,
        session: Callable[[], Session],
        registry: Registry[M],
        log: Callable[[str], None],
        *,
        lease: float = LEASE,
        expected: int = 0,
    ) -> None:
        """``session`` makes this end of a connection, and ``log`` writes a line about connections that were refused.

        ``expected``: ends of the job that may connect at the same moment, for which there is room beside strangers.
        """
        listener.setblocking(False)
        self._listener, self._session, self._registry, self._log = listener, session, registry, log
        self._lease, self._most = lease, expected + STRANGERS
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[_Stranger[M], None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._log_at = 0.0  # when the next line about connections that were refused may follow
        self._closed = False

    def run(self, take: Callable[[Connection[M], str, M], None]) -> None:
        """Call ``take`` with each authenticated connection, its address and its first message, until `close`.

        ``take`` has to return at once. The connection is closed if it raises OSError or RuntimeError.
        """
        while not self._closed:
            due = next((stranger.deadline for stranger in self._strangers), float("inf"))
            for key, _ in self._selector.select(max(0.0, min(_POLL, due - time.monotonic()))):
                if key.data is None:
                    self._accept()
                elif key.data in self._strangers:  # it has not made room meanwhile
                    self._advance(key.data, take)
            # Deadlines are checked after all that has arrived is read: this process may have been stopped for a while.
            now = time.monotonic()
            while (oldest := next(iter(self._strangers), None)) and now >= oldest.deadline:
                self._drop(oldest, f"it has not authenticated itself within {HANDSHAKE:.0f} s")
        for stranger in self._strangers:
            stranger.connection.close()
        self._selector.close()

    def serve(self, handle: Callable[[Stream[M], str], None], name: str) -> None:
        """Accept connections as `run` does, and call ``handle`` for each in a thread with this name.

        ``handle`` gets a blocking stream, which is closed when it returns, and the address of the other end.
        """

        def take(connection: Connection[M], address: str, message: M) -> None:
            stream = connection.to_stream(message)
            threading.Thread(target=self._handle, args=(handle, stream, address), name=name, daemon=True).start()

        self.run(take)

    def refuse(self, address: str, why: str) -> None:
        """Write a line about a connection that was refused, unless there was one a moment ago."""
        now = time.monotonic()
        with self._lock:
            if now < self._log_at:
                return
            self._log_at = now + LOG_INTERVAL
        self._log(f"refused a connection from {address}: {why}")

    def close(self) -> None:
        """Stop listening. Connections that were handed over stay."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        accepted = None
        with contextlib.suppress(OSError):  # closed
            accepted = accept(self._listener)
        if accepted is None:
            return
        sock, address = accepted[0], str(accepted[1][0])
        if len(self._strangers) >= self._most:
            self._drop(next(iter(self._strangers)), "it made room for newer ones")
        now = time.monotonic()
        try:
            sock.setblocking(False)
            connection = Connection(sock, self._session(), self._registry, self._lease, now)
        except OSError as error:  # the other end has gone again
            sock.close()
            self.refuse(address, reason(error))
            return
        stranger = _Stranger(connection, address, now + HANDSHAKE)
        self._strangers[stranger] = None
        self._selector.register(connection.socket, selectors.EVENT_READ, stranger)

    def _advance(self, stranger: _Stranger[M], take: Callable[[Connection[M], str, M], None]) -> None:
        """Read what has arrived, and hand the connection over with its first message."""
        connection = stranger.connection
        try:
            connection.flush()  # the greeting
            message = next(connection.receive(time.monotonic()), None)
            if message is None:
                return
            self._selector.unregister(connection.socket)
            take(connection, stranger.address, message)
            del self._strangers[stranger]
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be made
            self._drop(stranger, reason(error))

    def _drop(self, stranger: _Stranger[M], why: str) -> None:
        del self._strangers[stranger]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger.connection.socket)
        stranger.connection.close()
        self.refuse(stranger.address, why)

    def _handle(self, handle: Callable[[Stream[M], str], None], stream: Stream[M], address: str) -> None:
        with contextlib.closing(stream):
            handle(stream, address)
