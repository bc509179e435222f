"""Connection: a non-blocking end of a connection, with messages over a socket that a loop selects.

`LEASE` says how long the other end may be silent before it counts as lost, and `Backoff` when to try again.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

from flk_runtime.contract import user_env
from flk_runtime.wire.registry import Registry
from flk_runtime.wire.session import LENGTHS, Session
from flk_runtime.wire.stream import Stream

M = TypeVar("M")
_CHUNK: Final = 1 << 18  # bytes that are read or sent at once
_LONGEST_INTERVAL: Final = 32767  # seconds between two probes of an idle connection, for the kernel
_LARGEST_INT: Final = 2**31 - 1
_UNSENT_LIMIT: Final = 1 << 24  # bytes; a peer that reads so slowly is given up


LEASE: Final = float(user_env.LEASE.default)  # seconds that the other end may be silent before it counts as lost
BEATS: Final = 3  # times in a lease that an end says that it is there, if it has nothing else to send


# Without a state: threads of a rank draw too, and the script's own numbers must not depend on when they do.
_RANDOM: Final = random.SystemRandom()


class Backoff:
    """Delays that double, with a random part, so that many clients of one server do not come at the same moments."""

    def __init__(self, first: float, longest: float, uniform: Callable[[], float] = _RANDOM.random) -> None:
        """``first`` and ``longest`` are in seconds, before the random part. ``uniform`` returns numbers from 0 to 1."""
        self._first, self._longest, self._uniform = first, longest, uniform
        self._delay = first

    def next(self) -> float:
        """The seconds until the next try: half to one and a half of the delay without the random part."""
        delay, self._delay = self._delay, min(2 * self._delay, self._longest)
        return delay * (0.5 + self._uniform())

    def reset(self) -> None:
        """Begin anew, since the other end was reached."""
        self._delay = self._first


class Connection(Generic[M]):
    """One end of a connection. Every method returns at once and raises OSError if the connection is unusable.

    It is a ConnectionError or a TimeoutError, or another error of the network that the kernel tells.
    Messages can be sent when the other end has greeted (`met`). ``heard`` is the time, by the clock of the caller, at
    which the other end was last heard of.
    """

    __slots__ = ("_data_length", "_received", "_registry", "_unsent", "heard", "lease", "session", "socket")

    def __init__(self, sock: socket.socket, session: Session, registry: Registry[M], lease: float, now: float) -> None:
        """The kernel gives up data that the peer does not confirm within the ``lease``, a time in seconds."""
        sock.setblocking(False)
        self.lease = lease
        _configure(sock, lease)
        self.socket = sock
        self.session = session
        self.heard = now
        self._registry = registry
        self._received = bytearray()
        self._data_length = 0  # bytes of bulk data behind the latest message
        self._unsent, session.greeting = session.greeting, b""  # a leader has many sessions, and sends it once
        self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` must be called when the socket becomes writable."""
        return bool(self._unsent)

    def silence(self, now: float) -> str:
        """Say that the other end has been silent for longer than the lease; empty if it has not."""
        return f"it was silent for {now - self.heard:.0f} s" if now - self.heard > self.lease else ""

    def send(self, message: M) -> None:
        """Send a message, or as much of it as the kernel takes now."""
        self.send_encoded(self._registry.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send a message that the registry has encoded, as `send` does. It may be sent on many connections."""
        frame = self.session.seal(message)
        if len(self._unsent) + len(frame) > _UNSENT_LIMIT:
            raise ConnectionError(f"{self.session.other} did not read {len(self._unsent)} bytes")
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send the rest of former messages, as far as the kernel takes it now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent[:_CHUNK]) :]

    def receive(self, now: float) -> Iterator[M]:
        """Read the bytes that have arrived, and yield the messages that are complete.

        Raises VersionError, StrangerError for frames without the right authentication code, and ConnectionError at the
        end of the stream, for frames that are too long or no message, and for bytes that are no greeting.
        """
        if self.read(now):
            yield from self.messages()

    def read(self, now: float) -> bool:
        """Read the bytes that have arrived, and return whether there were any. Raises as `receive`."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionResetError(f"{self.session.other} closed the connection")
        self.heard = now
        self._received += data
        return True

    def messages(self) -> Iterator[M]:
        """Yield the complete messages among the bytes that were read. Raises as `receive`."""
        if not self.session.met:
            self._take(self.session.meet(self._received))
        while self.session.met and len(self._received) >= LENGTHS.size:
            length, self._data_length = self.session.lengths(self._received)
            if len(self._received) < length:
                return
            yield self._registry.decode(self.session.open(self._take(length)))

    def to_stream(self, message: M) -> Stream[M]:
        """Go on as a blocking end, which receives ``message`` next: the first one, which was read here."""
        rest, self._received = bytes(self._received), bytearray()
        return Stream(self.socket, self.session, self._registry, self.lease, (message, self._data_length), rest)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _take(self, length: int) -> bytes:
        taken = bytes(self._received[:length])
        del self._received[:length]
        return taken


def was_closed(error: OSError) -> bool:
    """Whether the other end has closed the connection, or its host has because the process has ended."""
    return isinstance(error, ConnectionResetError | BrokenPipeError)


def _configure(sock: socket.socket, lease: float) -> None:
    """Let the kernel detect a peer that is gone, also where nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval = min(max(1, round(lease / BEATS)), _LONGEST_INTERVAL)
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
