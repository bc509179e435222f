"""Authentication of the connections between launchers by a secret that the pods of a job share.

The connections are those of the rendezvous, and those on which parts of checkpoints travel. Both sides send a nonce. A
session key is derived from the secret, the nonces and the identity of both sides. Each side proves that it knows the
key, and each later line carries a message authentication code (HMAC-SHA256, RFC 2104) that covers its direction and its
number. So nobody without the secret can pretend to be a launcher of the job, or insert, change, repeat or reorder
messages. The messages are not encrypted.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence

MAC_LENGTH = 64  # characters
_DIGEST = "sha256"


def new_nonce() -> str:
    """A random value that no other connection uses."""
    return secrets.token_hex(16)


def session_key(secret: str, identity: Sequence[str | int]) -> bytes:
    """Key of one connection. ``identity`` says what is connected, and contains the nonces of both sides."""
    return hmac.digest(secret.encode(), json.dumps(list(identity)).encode(), _DIGEST)


def proof(key: bytes) -> str:
    """What the side that accepts a connection shows to the other so that the other knows that it has the key."""
    return code(key, "proof", 0, b"")


def code(key: bytes, direction: str, number: int, line: bytes) -> str:
    """Message authentication code of line ``number`` in one direction of a connection, in hex."""
    return hmac.digest(key, f"{direction} {number} ".encode() + line, _DIGEST).hex()


def equal(one: str, other: str) -> bool:
    """Compare two codes in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode(), other.encode())
