"""Connections between two launchers on which parts of checkpoints travel, apart from those of the rendezvous.

So a large part delays neither heartbeats nor signals. A message is a line of JSON with an authentication code
(`launcher.authentication`); the bytes of a part follow it as they are, and are checked by the checksum in the part.
All methods block, for at most the time of a lease without progress, and raise OSError.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import socket
from typing import Any, Final

from flk_runtime.launcher import authentication
from flk_runtime.launcher.settings import Settings
from flk_runtime.shared.shard_file import DATA_BEGIN, PartError, Prelude, check_data
from flk_runtime.system.checksum import crc32

_SENT: Final = 1 << 22  # bytes that are sent at once
_RECEIVED: Final = 1 << 20  # bytes that are received at once; they stay in the processor's cache for the checksum
_MORE: Final = getattr(socket, "MSG_MORE", 0)  # a message leaves together with what follows it
_PLAIN_LIMIT: Final = 1 << 12  # bytes of a line before the other side has authenticated itself
_SEALED_LIMIT: Final = 1 << 26  # bytes of a line afterwards: headers of parts are long
_HANDSHAKE_TIMEOUT: Final = 10.0  # seconds
_CONNECT_TIMEOUT: Final = 3.0  # seconds


class RefusedError(ConnectionError):
    """The other side is not a launcher of this job, or does not do what it was asked; a repetition does not help."""


class DataConnection:
    """One end of a connection. One thread uses it and closes it; any thread may call `interrupt`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._reader = io.BufferedReader(socket.SocketIO(sock, "r"), 1 << 16)
        self._key: bytes | None = None
        self._directions = ("", "")  # of what is sent and of what is received
        self._sent = self._received = 0  # lines

    @classmethod
    def connect(cls, address: tuple[str, int], settings: Settings) -> DataConnection:
        """Connect to the launcher at ``address``. Each side proves to the other that it knows the job's secret."""
        connection = cls(socket.create_connection(address, timeout=min(_CONNECT_TIMEOUT, settings.lease)))
        try:
            hello: dict[str, Any] = {"job": settings.job, "uid": settings.job_uid, "pod": settings.pod}
            hello["nonce"] = authentication.new_nonce()
            connection.send(hello)
            challenge = connection.receive()
            key = _key(settings, hello, str(challenge["nonce"]))
            if not authentication.equal(str(challenge["proof"]), authentication.proof(key)):
                raise RefusedError("the launcher at this address does not know the secret of this job")
            connection._seal(key, "client", "server")
            connection.set_timeout(settings.lease)
        except BaseException:
            connection.close()
            raise
        return connection

    @classmethod
    def accept(cls, sock: socket.socket, settings: Settings) -> DataConnection:
        """Make a connection of an accepted socket. The other side is authenticated by its first message."""
        sock.settimeout(_HANDSHAKE_TIMEOUT)
        connection = cls(sock)
        try:
            hello = connection.receive()
            if (hello["job"], hello["uid"]) != (settings.job, settings.job_uid):
                raise RefusedError("belongs to another job")
            nonce = authentication.new_nonce()
            key = _key(settings, hello, nonce)
            connection.send({"nonce": nonce, "proof": authentication.proof(key)})
            connection._seal(key, "server", "client")
        except BaseException:
            connection.close()
            raise
        return connection

    def set_timeout(self, seconds: float | None) -> None:
        """Raise TimeoutError after so many seconds without progress; None: wait for ever."""
        self._socket.settimeout(seconds)

    def send(self, message: dict[str, Any], *, more: bool = False) -> None:
        """Send a message. ``more``: something follows it at once."""
        line = json.dumps(message, separators=(",", ":")).encode()
        if self._key is not None:
            mac = authentication.code(self._key, self._directions[0], self._sent, line)
            self._sent += 1
            line = mac.encode() + line
        self._socket.sendall(line + b"\n", _MORE if more else 0)

    def receive(self) -> dict[str, Any]:
        """Wait for a message. Raises ConnectionError if the other side ends or does not know the secret."""
        limit = _PLAIN_LIMIT if self._key is None else _SEALED_LIMIT
        line = self._reader.readline(limit)
        if not line.endswith(b"\n"):
            raise ConnectionError(f"sent a line of more than {limit} bytes" if len(line) >= limit else "ended")
        line = line[:-1]
        if self._key is not None:
            mac, line = line[: authentication.MAC_LENGTH], line[authentication.MAC_LENGTH :]
            expected = authentication.code(self._key, self._directions[1], self._received, line)
            if not authentication.equal(mac.decode(errors="replace"), expected):
                raise RefusedError("does not know the secret of this job")
            self._received += 1
        try:
            message = json.loads(line)
        except ValueError:
            raise ConnectionError("sent what is not a message") from None
        if not isinstance(message, dict):
            raise ConnectionError("sent what is not a message")
        return message

    def send_part(self, memory: mmap.mmap, length: int, announcement: dict[str, Any]) -> None:
        """Send a message, and the first ``length`` bytes of a part's file behind it."""
        self.send(announcement, more=True)
        with memoryview(memory) as view:
            for begin in range(0, length, _SENT):  # the timeout is for each piece
                with view[begin : min(length, begin + _SENT)] as piece:
                    self._socket.sendall(piece)

    def receive_part(self, memory: mmap.mmap, length: int) -> Prelude:
        """Receive a part of ``length`` bytes into its file, all but its prelude, which is returned.

        Raises PartError if it is no part, or was damaged on its way. The connection can be used further then.
        """
        beginning = self._receive_exactly(min(length, DATA_BEGIN))
        checksum = 0
        with memoryview(memory) as view:
            for begin in range(DATA_BEGIN, length, _RECEIVED):
                with view[begin : min(length, begin + _RECEIVED)] as piece:
                    self._fill(piece)
                    checksum = crc32(piece, checksum)
        prelude = Prelude.from_bytes(beginning)
        if prelude.end != length:
            raise PartError(f"it has {length} of its {prelude.end} bytes")
        check_data(prelude, checksum)
        return prelude

    def skip_part(self, length: int) -> None:
        """Receive a part of ``length`` bytes for which there is no room."""
        while length > 0:
            length -= len(self._receive_exactly(min(length, _RECEIVED)))

    def _receive_exactly(self, length: int) -> bytes:
        data = self._reader.read(length)
        if len(data) < length:
            raise ConnectionError("ended in the middle of a part")
        return data

    def _fill(self, view: memoryview) -> None:
        received = 0
        while received < len(view):
            with view[received:] as rest:
                count = self._reader.readinto(rest)
            if not count:
                raise ConnectionError("ended in the middle of a part")
            received += count

    def interrupt(self) -> None:
        """Have the thread that uses the connection get an OSError, now or at its next call.

        The descriptor stays open: a call that is under way could otherwise write into what gets its number next.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.interrupt()
        self._socket.close()

    def _seal(self, key: bytes, sends: str, receives: str) -> None:
        self._key = key
        self._directions = (sends, receives)


def listen(settings: Settings) -> socket.socket:
    """Listen on a free port, on all addresses; on the loopback interface only if all pods are on this machine."""
    if settings.pods == 1 or settings.pod_ip == "127.0.0.1":
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", 0))  # noqa: S104 - the launchers of other pods connect to it


def reason(error: OSError) -> str:
    """What went wrong, in a few words."""
    return os.strerror(error.errno) if error.errno else str(error)


def _key(settings: Settings, hello: dict[str, Any], nonce: str) -> bytes:
    identity: list[str | int] = [
        "memory",
        settings.job,
        settings.job_uid,
        int(hello["pod"]),
        str(hello["nonce"]),
        nonce,
    ]
    return authentication.session_key(settings.secret, identity)
