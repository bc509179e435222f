"""Codes of bulk data."""

from __future__ import annotations

import hmac
import os

import pytest

from flk_runtime.wire import Session, bulk_code
from flk_runtime.wire.bulk_code import DIGEST

KEY = bytes(range(32))
# The package `cryptography` gives this tag for these bytes, with the key that is derived from KEY and the nonce 7.
DATA = bytes(index % 251 for index in range(1300))
TAG = "ce49ec3c5da3fd2b517447c885b65c0f"


def code_of(*pieces: bytes | bytearray | memoryview, key: bytes = KEY, number: int = 7, gmac: bool = True) -> bytes:
    code = bulk_code.bulk_code(key, number, gmac=gmac)
    for piece in pieces:
        code.update(piece)
    return code.digest()


@pytest.mark.skipif(not bulk_code.HAS_GMAC, reason="this Python's OpenSSL cannot be called")
def test_the_code_is_that_of_another_program() -> None:
    assert code_of(DATA) == hmac.digest(KEY, bytes.fromhex(TAG), DIGEST)


@pytest.mark.parametrize("gmac", [pytest.param(bulk_code.HAS_GMAC, id="GMAC"), pytest.param(False, id="HMAC")])
def test_a_code_depends_on_the_bytes_the_key_and_the_number_alone(gmac: bool) -> None:
    data = bytearray(os.urandom(1000))
    whole = code_of(bytes(data), gmac=gmac)
    assert len(whole) == 32
    assert code_of(memoryview(data)[:300], b"", memoryview(bytes(data))[300:], gmac=gmac) == whole
    assert code_of(data, number=8, gmac=gmac) != whole
    assert code_of(data, key=KEY[::-1], gmac=gmac) != whole
    data[500] ^= 1
    assert code_of(data, gmac=gmac) != whole


@pytest.mark.parametrize("lacks_it", ["both", "server", "client", "none"])
def test_two_ends_take_what_both_can_compute(monkeypatch: pytest.MonkeyPatch, lacks_it: str) -> None:
    ends = {}
    for name in ("server", "client"):
        monkeypatch.setattr(bulk_code, "HAS_GMAC", bulk_code._openssl is not None and lacks_it not in ("both", name))
        ends[name] = Session("s", ["gpt"], serves=name == "server")
    server, client = ends["server"], ends["client"]
    server.meet(client.greeting)
    client.meet(server.greeting)
    sent, received = client.data_code(sent=True), server.data_code(sent=False)
    assert type(sent) is type(received)
    for code in (sent, received):
        code.update(b"some data")
    server.check(received, sent.digest())
