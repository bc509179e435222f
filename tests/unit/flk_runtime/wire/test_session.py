"""Codes of bulk data."""

from __future__ import annotations

import os

import pytest

from flk_runtime.wire import Session, StrangerError


def _sessions() -> tuple[Session, Session]:
    server, client = (Session("s", ["gpt"], serves=serves) for serves in (True, False))
    server.meet(client.greeting)
    client.meet(server.greeting)
    return server, client


def test_the_code_of_bulk_data_depends_on_its_bytes_and_not_on_its_pieces() -> None:
    server, client = _sessions()
    data = bytearray(os.urandom(1000))
    sent, received = client.data_code(sent=True), server.data_code(sent=False)
    sent.update(data)
    received.update(memoryview(data)[:300])
    received.update(memoryview(bytes(data))[300:])
    server.check(received, sent.digest())
    repeated = server.data_code(sent=False)  # the next data has a code of its own, even if its bytes are the same
    repeated.update(data)
    with pytest.raises(StrangerError):
        server.check(repeated, sent.digest())
