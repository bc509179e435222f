"""The authentication of one connection: greetings, a key that both ends derive, and a code for each frame.

Each end sends a greeting at once. It names the version of the protocol, shows to which purpose and job the end belongs
and that it knows the secret of the job, and has a nonce. The proof covers the version, so that nobody else can make an
end believe that the other one is of another version. The layout of greetings is the same in all versions. The key of
the connection is derived from the secret and both nonces. Each later frame carries a code (HMAC-SHA256, RFC 2104) that
covers its direction and its number. So nobody without the secret can pretend to belong to the job, or insert,
change, repeat or reorder frames. Bulk data has a code of its own, so that its pieces can be used while
others are on their way.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Sequence
from typing import Final

from flk_runtime.errors import RendezvousError, SetupError
from flk_runtime.wire.registry import LIMIT

VERSION: Final = 10
DIGEST: Final = "sha256"  # computed in hardware, at more than 1 GB/s
_GREETING: Final = struct.Struct(">4sH8s16s16s")  # magic, version, job, proof of the secret, nonce
LENGTHS: Final = struct.Struct(">IQ")  # of a message and of the bulk data behind it
CODE: Final = 32  # bytes
_MAGIC: Final = b"flk\n"
_CHANGED: Final = "sent data without the right authentication code: it was changed on its way"
_FIRST_LIMIT: Final = 1 << 16  # bytes of the first message, before which the other end may be anybody


class StrangerError(RendezvousError, ConnectionError):
    """The other end does not belong to this job, or does not know its secret."""


class VersionError(SetupError, ConnectionError):
    """The other end belongs to this job and speaks another version of the protocol: no repetition helps."""


class Session:
    """One end of one connection. It has no socket: `flk_runtime.wire.Connection` and `Stream` send and receive."""

    __slots__ = (
        "_ends", "_job", "_keys", "_nonce", "_received", "_secret", "_sent", "_serves", "greeting", "other"
    )  # fmt: skip

    def __init__(self, secret: str, realm: Sequence[str | int], *, serves: bool, other: str = "it") -> None:
        """``realm`` is the purpose of the connection and the job: both ends must name the same.

        ``serves`` says whether this end has accepted the connection. ``other`` is the other end, for messages.
        """
        self.other = other
        self._job, self._secret = _identity(secret, *realm)
        self._serves = serves
        self._ends = (b"server", b"client") if serves else (b"client", b"server")
        self._nonce = secrets.token_bytes(16)
        self._keys = (b"", b"")  # of sent and of received data
        self._sent = self._received = 0  # codes
        self.greeting = _GREETING.pack(_MAGIC, VERSION, self._job, self._proof(self._ends[0], VERSION), self._nonce)

    @property
    def met(self) -> bool:
        """Whether the other end has greeted."""
        return bool(self._keys[0])

    @property
    def authenticated(self) -> bool:
        """Whether the other end has proved, with a frame, that it knows the key."""
        return self._received > 0

    def meet(self, data: bytes | bytearray) -> int:
        """Take the greeting of the other end, with which ``data`` begins, and return its length; 0: more must arrive.

        Raises VersionError, StrangerError, and ConnectionError for data that is no greeting.
        """
        if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
            raise ConnectionError(f"{self.other} does not speak the protocol of this version of flk")
        if len(data) < _GREETING.size:
            return 0
        _, version, job, proof, nonce = _GREETING.unpack_from(data)
        if job != self._job:
            raise StrangerError(f"{self.other} belongs to another job")
        if not hmac.compare_digest(proof, self._proof(self._ends[1], version)):
            raise StrangerError(f"{self.other} does not know the secret of this job")
        if version != VERSION:
            raise VersionError(
                f"{self.other} speaks version {version} of flk's protocol and this end version {VERSION}: "
                "give all pods and workers the same version of flk"
            )
        nonces = (self._nonce, nonce) if self._serves else (nonce, self._nonce)
        key = hmac.digest(self._secret, b"".join(nonces), DIGEST)
        self._keys = (hmac.digest(key, self._ends[0], DIGEST), hmac.digest(key, self._ends[1], DIGEST))
        self._nonce = b""
        return _GREETING.size

    def seal(self, message: bytes, data_length: int = 0) -> bytes:
        """A frame with a message, which ``data_length`` bytes of bulk data and their code follow."""
        frame = LENGTHS.pack(len(message), data_length) + message
        code = hmac.digest(self._keys[0], self._sent.to_bytes(8, "big") + frame, DIGEST)
        self._sent += 1
        return frame + code

    def lengths(self, data: bytes | bytearray) -> tuple[int, int]:
        """The lengths of a frame without its bulk data, and of the bulk data. Raises ConnectionError if too long."""
        length, data_length = LENGTHS.unpack_from(data)
        limit = LIMIT if self.authenticated else _FIRST_LIMIT
        if length > limit:
            raise ConnectionError(f"{self.other} sent a message of more than {limit} bytes")
        return LENGTHS.size + length + CODE, data_length

    def open(self, frame: bytes | bytearray) -> bytes:
        """The message in a frame. Raises StrangerError if it lacks the right code."""
        content, code = frame[:-CODE], frame[-CODE:]
        expected = hmac.digest(self._keys[1], self._received.to_bytes(8, "big") + bytes(content), DIGEST)
        if not hmac.compare_digest(bytes(code), expected):
            raise StrangerError(f"{self.other} {_CHANGED}")
        self._received += 1
        return bytes(content[LENGTHS.size :])

    def data_code(self, *, sent: bool) -> hmac.HMAC:
        """An HMAC that computes the code of the next bulk data: ``sent`` by this end, or received."""
        number = self._sent if sent else self._received
        if sent:
            self._sent += 1
        else:
            self._received += 1
        return hmac.new(self._keys[not sent], number.to_bytes(8, "big"), DIGEST)

    def check(self, computed: hmac.HMAC, code: bytes | bytearray) -> None:
        """Raise StrangerError if ``code`` differs from the code that `data_code` computed."""
        if not hmac.compare_digest(computed.digest(), bytes(code)):
            raise StrangerError(f"{self.other} {_CHANGED}")

    def _proof(self, end: bytes, version: int) -> bytes:
        return hmac.digest(self._secret, end + version.to_bytes(2, "big"), DIGEST)[:16]


@functools.lru_cache(8)
def _identity(secret: str, *realm: str | int) -> tuple[bytes, bytes]:
    """The name of a purpose and a job in greetings, and the secret for them. The sessions of a leader share it."""
    name = json.dumps(realm).encode()
    return hashlib.sha256(name).digest()[:8], hmac.digest(secret.encode(), name, DIGEST)
