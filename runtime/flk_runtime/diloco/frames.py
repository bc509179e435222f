"""Frames: authenticated messages with binary data over one TCP connection, and the count of their bytes.

Both ends send a nonce and derive the key of the connection from it and the secret that the workers share. Each later
frame carries an HMAC-SHA256 (RFC 2104) of its direction, number and content: nobody without the secret can take part,
or change, repeat or reorder messages. Only TLS encrypts them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any

from flk_runtime.diloco.tls import TlsSocket

Header = dict[str, Any]

LEASE = 15.0  # seconds of silence after which a worker or the hub is lost
_LENGTHS = struct.Struct(">IQ")  # of the header and of the data
_MAC = 32  # bytes
_PLAIN_LIMIT = 1 << 12  # bytes of a frame before the other end has authenticated itself
_HEADER_LIMIT = 1 << 20
HANDSHAKE_TIMEOUT = 10.0  # seconds


class Frames:
    """One end of a connection. One thread may send while another one receives.

    Every method raises OSError when the connection breaks, and ConnectionError when the other end does not know the
    secret or is silent for longer than the timeout of the socket.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._socket = sock
        self._key = b""
        self._directions = (b"", b"")
        self._numbers = [0, 0]
        self._sending = threading.Lock()
        self.sent = 0  # bytes, of TCP's content
        self.received = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def shake_hands(self, secret: str, *, serves: bool, timeout: float) -> None:
        """Agree with the other end on a key. ``timeout`` is that of the socket afterwards."""
        self._socket.settimeout(HANDSHAKE_TIMEOUT)
        own = secrets.token_hex(16)
        self.send({"nonce": own})
        other = self.receive()[0].get("nonce")
        if not isinstance(other, str):
            raise ConnectionError("the other end does not speak this protocol")
        nonces = (own, other) if serves else (other, own)
        self._key = hmac.digest(secret.encode(), json.dumps(["flk diloco", *nonces]).encode(), "sha256")
        self._directions = (b"hub", b"worker") if serves else (b"worker", b"hub")
        self._socket.settimeout(timeout)

    def send(self, header: Header, data: bytes | bytearray = b"") -> None:
        """Send a message."""
        head = json.dumps(header).encode()
        lengths = _LENGTHS.pack(len(head), len(data))
        with self._sending:
            mac = self._mac(0, lengths, head, data)
            self._socket.sendall(lengths + head)
            if data:
                self._socket.sendall(data)
            self._socket.sendall(mac)
            self.sent += len(lengths) + len(head) + len(data) + len(mac)

    def receive(self) -> tuple[Header, bytearray]:
        """The next message: its header and its data."""
        lengths = self._read(_LENGTHS.size)
        head_length, data_length = _LENGTHS.unpack(lengths)
        if head_length > (_HEADER_LIMIT if self._key else _PLAIN_LIMIT) or (data_length and not self._key):
            raise ConnectionError("the other end does not speak this protocol")
        head, data = self._read(head_length), self._read(data_length)
        expected = self._mac(1, lengths, head, data)
        if not hmac.compare_digest(self._read(len(expected)), expected):
            raise ConnectionError("the other end has another secret")
        try:
            header = json.loads(bytes(head))
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise ConnectionError("the other end does not speak this protocol")
        self.received += len(lengths) + head_length + data_length + len(expected)
        return header, data

    def close(self) -> None:
        """Close the connection; a thread that sends or receives gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, direction: int, *parts: bytes | bytearray) -> bytes:
        if not self._key:
            return b""
        mac = hmac.new(self._key, self._directions[direction], "sha256")
        for part in (self._numbers[direction].to_bytes(8, "big"), *parts):
            mac.update(part)
        self._numbers[direction] += 1
        return mac.digest()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            try:
                number = self._socket.recv_into(view[done : done + (1 << 20)])
            except TimeoutError:
                raise ConnectionError("the other end is silent") from None
            if not number:
                raise ConnectionError("the other end has closed the connection")
            done += number
        return data
