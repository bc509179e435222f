"""TlsSocket: a TLS connection on which one thread sends while another one receives.

Two threads must not use a connection of OpenSSL at the same time, and Python locks it only since 3.13. So the socket
does not block, a lock covers each call, and a thread waits for the other end without the lock.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

_PIECE: Final = 1 << 16  # bytes that are sent under the lock at once


class TlsSocket:
    """A socket with the methods that `flk_runtime.wire.Stream` and `Connection` use, over an SSLSocket.

    Without a handshake before, the first calls make it.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._timeout = sock.gettimeout()
        self._lock = threading.Lock()
        sock.setblocking(False)

    def settimeout(self, seconds: float | None) -> None:
        """Raise TimeoutError from later calls after ``seconds`` without progress; None: never."""
        self._timeout = seconds

    def setblocking(self, blocking: bool) -> None:
        """Raise BlockingIOError from later calls where they would wait; True: they wait for ever."""
        self._timeout = None if blocking else 0.0

    def fileno(self) -> int:
        """The descriptor, to be selected. What has arrived and was decrypted does not make it readable."""
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the TCP connection."""
        self._socket.setsockopt(level, option, value)

    def send(self, data: bytes | memoryview) -> int:
        """Send some bytes, and return how many."""
        with memoryview(data)[:_PIECE] as piece:
            return self._without_blocking(partial(self._socket.send, piece))

    def recv(self, most: int) -> bytes:
        """Receive at most so many bytes; none: the other end has closed the connection."""
        buffer = bytearray(min(most, _PIECE))
        with memoryview(buffer) as view:
            return bytes(buffer[: self.recv_into(view)])

    def recv_into(self, buffer: memoryview) -> int:
        """Receive some bytes into ``buffer``, and return how many; 0: the other end has closed the connection."""
        return self._without_blocking(partial(self._socket.recv_into, buffer))

    def shutdown(self, how: int) -> None:
        """End the TCP connection; a thread that sends or receives gets an OSError."""
        # That of SSLSocket forgets the encryption first, and a thread that sends meanwhile would send plain text.
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._socket.close()

    def _without_blocking(self, action: Callable[[], int]) -> int:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            with self._lock:
                try:
                    return action()
                except ssl.SSLWantReadError:
                    event = select.POLLIN
                except ssl.SSLWantWriteError:
                    event = select.POLLOUT
                number = self._socket.fileno()
            self._wait(number, event, deadline)

    def _wait(self, number: int, event: int, deadline: float | None) -> None:
        if self._timeout == 0:
            raise BlockingIOError("it would wait")
        poll = select.poll()
        poll.register(number, event)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError("timed out")
