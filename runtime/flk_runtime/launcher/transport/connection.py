"""A connection between a member and the leader: messages as lines over a non-blocking socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from flk_runtime.launcher import authentication
from flk_runtime.launcher.transport.messages import Message, MessageError, decode, encode

_CHUNK = 1 << 18  # bytes that are read at once
PLAIN_LIMIT = 1 << 12  # bytes of a line before the other side has authenticated itself
SEALED_LIMIT = 1 << 22  # bytes of a line afterwards
_LONGEST_INTERVAL = 32767  # seconds between two probes of an idle connection, for the kernel
_LARGEST_INT = 2**31 - 1
_UNSENT_LIMIT = 1 << 24  # bytes; a peer that reads so slowly is given up


class Connection:
    """One end of a connection. Every method returns at once and raises ConnectionError if the connection is unusable.

    ``heard`` is the time, by the clock of the caller, at which the other side was last heard of.
    """

    def __init__(self, sock: socket.socket, lease: float, now: float) -> None:
        """``lease`` is the time in seconds after which the kernel gives up data that the peer does not confirm."""
        sock.setblocking(False)
        _configure(sock, lease)
        self.socket = sock
        self.heard = now
        self._received = b""
        self._unsent = b""
        self._key: bytes | None = None
        self._directions = ("", "")  # of what is sent and of what is received
        self._sent_lines = self._received_lines = 0

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called when the socket becomes writable."""
        return bool(self._unsent)

    def seal(self, key: bytes, sends: str, receives: str) -> None:
        """Authenticate all further lines with ``key``. The names of the two directions must differ."""
        self._key = key
        self._directions = (sends, receives)

    def send(self, message: Message) -> None:
        """Send a message, or as much of it as the kernel takes now."""
        line = encode(message)
        if self._key is not None:
            mac = authentication.code(self._key, self._directions[0], self._sent_lines, line)
            self._sent_lines += 1
            line = mac.encode() + line
        if len(self._unsent) + len(line) > _UNSENT_LIMIT:
            raise ConnectionError(f"did not read {len(self._unsent)} bytes")
        self._unsent += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what is left of former messages, as far as the kernel takes it now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent[:_CHUNK]) :]

    def receive(self, now: float) -> Iterator[Message]:
        """Read what has arrived, and yield the messages that are complete.

        Raises ConnectionError at the end of the stream, for a line that is too long, is no message or lacks the right
        authentication code.
        """
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("closed the connection")
        self.heard = now
        self._received += data
        while True:
            line, newline, rest = self._received.partition(b"\n")
            limit = PLAIN_LIMIT if self._key is None else SEALED_LIMIT
            if len(line) > limit:
                raise ConnectionError(f"sent a line of more than {limit} bytes")
            if not newline:
                return
            self._received = rest
            yield self._open(line)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _open(self, line: bytes) -> Message:
        if self._key is not None:
            mac, line = line[: authentication.MAC_LENGTH], line[authentication.MAC_LENGTH :]
            expected = authentication.code(self._key, self._directions[1], self._received_lines, line)
            if not authentication.equal(mac.decode(errors="replace"), expected):
                raise ConnectionError("does not know the secret of this job")
            self._received_lines += 1
        try:
            return decode(line)
        except MessageError as error:
            raise ConnectionError(f"sent what is {error}") from None


def _configure(sock: socket.socket, lease: float) -> None:
    """Let the kernel detect a peer that is gone, also where nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = min(max(1, round(lease / 3)), _LONGEST_INTERVAL)
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": min(round(lease * 1000), _LARGEST_INT),  # milliseconds
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
