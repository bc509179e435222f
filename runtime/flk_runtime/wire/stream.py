"""Stream: a blocking end of a connection, for threads, with messages and bulk data behind them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from flk_runtime.wire.registry import Registry
from flk_runtime.wire.session import CODE, LENGTHS, Session

M = TypeVar("M")
_HANDSHAKE_TIMEOUT: Final = 10.0  # seconds
_PIECE: Final = 1 << 20  # bytes that are sent or received at once; they stay in the processor's cache for the code


class Stream(Generic[M]):
    """One end of a connection. One thread may send while another one receives; any thread may call `interrupt`.

    All methods block for at most ``timeout`` seconds without progress; None: for ever. They raise OSError: TimeoutError
    after that, StrangerError for what lacks the right authentication code, VersionError from the constructor, and
    ConnectionError when the other end closes the connection or sends something else than a message of the registry.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        registry: Registry[M],
        timeout: float | None = _HANDSHAKE_TIMEOUT,
        first: tuple[M, int] | None = None,
        rest: bytes = b"",
    ) -> None:
        """Greet, and wait for the greeting of the other end, unless both have. The socket is closed if that fails.

        ``first`` is a message, with the bytes of bulk data behind it, that was received before, and ``rest`` what was
        received behind it.
        """
        self._socket, self._session, self._registry = sock, session, registry
        self._first, self._rest = first, rest
        self._sending = threading.Lock()
        try:
            with contextlib.suppress(OSError):  # a Unix socket has none of them
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if not session.met:
                self._greet()
            sock.settimeout(timeout)
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        """Exchange greetings. The other end has to send all of its own in time: it may be anybody."""
        deadline = time.monotonic() + _HANDSHAKE_TIMEOUT
        self._socket.settimeout(_HANDSHAKE_TIMEOUT)
        self._send(self._session.greeting)
        greeting = bytearray(len(self._session.greeting))
        done = 0
        while done < len(greeting):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            with memoryview(greeting) as view, view[done:] as missing:
                done += self._receive_into(missing)
        self._session.meet(greeting)
        self._session.greeting = b""  # it has been sent: `Connection` may go on with the socket

    def send(self, message: M, data: bytes | bytearray | memoryview = b"") -> None:
        """Send a message, and bulk data behind it."""
        content = self._registry.encode(message)
        with self._sending, memoryview(data) as view:
            self._send(self._session.seal(content, len(view)))
            if not view:
                return
            code = self._session.data_code(sent=True)
            for begin in range(0, len(view), _PIECE):
                with view[begin : begin + _PIECE] as piece:
                    code.update(piece)
                    self._send(piece)
            self._send(code.digest())

    def receive(self) -> tuple[M, int]:
        """The next message, and the bytes of bulk data behind it, which have to be received or skipped next."""
        if self._first:
            first, self._first = self._first, None
            return first
        lengths = self._read(LENGTHS.size)
        length, data_length = self._session.lengths(lengths)
        content = self._session.open(lengths + self._read(length - LENGTHS.size))
        return self._registry.decode(content), data_length

    def receive_data(self, *buffers: memoryview) -> Iterator[memoryview]:
        """Fill ``buffers``, one after the other, with the bulk data, and yield each section when it has arrived.

        The data may be used only when the iterator has ended, which raises StrangerError if the data was changed.
        """
        code = self._session.data_code(sent=False)
        for buffer in buffers:
            for begin in range(0, len(buffer), _PIECE):
                with buffer[begin : begin + _PIECE] as piece:
                    self._fill(piece)
                    code.update(piece)
                    yield piece
        self._session.check(code, self._read(CODE))

    def receive_bytes(self, length: int) -> bytearray:
        """The bulk data as bytes."""
        data = bytearray(length)
        if length:
            with memoryview(data) as view:
                for _ in self.receive_data(view):
                    pass
        return data

    def skip_data(self, length: int) -> None:
        """Receive bulk data that is not wanted."""
        with memoryview(bytearray(min(length, _PIECE))) as piece:
            for _ in self.receive_data(*[piece] * (length // _PIECE), piece[: length % _PIECE]):
                pass

    def interrupt(self) -> None:
        """Have the threads that use the connection get an OSError, now or at their next call.

        The descriptor stays open: a call that is under way could otherwise write into what gets its number next.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.interrupt()
        self._socket.close()

    def _send(self, data: bytes | memoryview) -> None:
        done = 0
        with memoryview(data) as view:
            while done < len(view):  # not by sendall(), for which all of it has to be sent within the timeout
                with view[done:] as rest:
                    done += self._socket.send(rest)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        with memoryview(data) as view:
            self._fill(view)
        return data

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            with view[done:] as missing:
                done += self._receive_into(missing)

    def _receive_into(self, view: memoryview) -> int:
        if self._rest:
            count = min(len(view), len(self._rest))
            view[:count], self._rest = self._rest[:count], self._rest[count:]
        else:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                raise TimeoutError(f"{self._session.other} was silent") from None
        if not count:
            raise ConnectionError(f"{self._session.other} closed the connection")
        return count


def reason(error: Exception) -> str:
    """The reason of an error, in a few words."""
    return str(getattr(error, "strerror", None) or error)
