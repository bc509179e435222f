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
from pathlib import Path
from typing import Any, Final

from flk_runtime.launcher import authentication
from flk_runtime.launcher.settings import Settings

_CHUNK: Final = 1 << 22  # bytes that are sent or received at once
_WINDOW: Final = 1 << 26  # bytes of a file that are mapped at once; Python's lock is held meanwhile
_MAPPED: Final = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # a fault for each page takes longer
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

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        line = json.dumps(message, separators=(",", ":")).encode()
        if self._key is not None:
            mac = authentication.code(self._key, self._directions[0], self._sent, line)
            self._sent += 1
            line = mac.encode() + line
        self._socket.sendall(line + b"\n")

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

    def send_file(self, path: Path, length: int) -> None:
        """Send the first ``length`` bytes of a file."""
        with open(path, "rb") as file:
            sent = 0
            while sent < length:  # in pieces: the timeout is for each of them
                count = self._socket.sendfile(file, sent, min(_CHUNK, length - sent))
                if count == 0:
                    raise ConnectionError("the file became shorter")
                sent += count

    def receive_file(self, path: Path, length: int) -> None:
        """Write the next ``length`` bytes to the beginning of a file in tmpfs that has at least as many."""
        with open(path, "r+b") as file:
            for begin in range(0, length, _WINDOW):
                size = min(_WINDOW, length - begin)
                with mmap.mmap(file.fileno(), size, flags=_MAPPED, offset=begin) as memory, memoryview(memory) as view:
                    self._fill(view)

    def _fill(self, view: memoryview) -> None:
        received = 0
        while received < len(view):
            with view[received : received + _CHUNK] as piece:
                count = self._reader.readinto(piece)
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
