"""Connections of loops: messages in order, authentication codes, versions and limits."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flk_runtime.wire import Connection, Registry, Session, StrangerError, VersionError, session

GREETING = len(Session("", [], serves=True).greeting)


@dataclass(frozen=True)
class Number:
    value: int
    text: str = ""


NUMBERS: Registry[Any] = Registry([Number])
Ends = tuple[Connection[Any], Connection[Any]]


@pytest.fixture
def socks() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


@pytest.fixture
def ends(socks: tuple[socket.socket, socket.socket]) -> Ends:
    """A client and a server that have greeted each other."""
    client, server = opened(socks)
    receive(client, 0)
    receive(server, 0)
    return client, server


def opened(
    socks: tuple[socket.socket, socket.socket],
    secrets: tuple[str, str] = ("s", "s"),
    realms: tuple[str, str] = ("gpt", "gpt"),
) -> Ends:
    client, server = (
        Connection(sock, Session(secret, [realm], serves=serves), NUMBERS, 15.0, 0.0)
        for sock, secret, realm, serves in zip(socks, secrets, realms, (False, True), strict=True)
    )
    return client, server


def receive(connection: Connection[Any], count: int) -> list[Any]:
    """Wait for the greeting and so many messages."""
    connection.socket.settimeout(10)
    messages: list[Any] = []
    while not connection.session.met or len(messages) < count:
        messages += connection.receive(1.0)
    connection.socket.setblocking(False)
    return messages


def test_messages_arrive_in_order_in_both_directions(ends: Ends) -> None:
    client, server = ends
    for number in range(3):
        client.send(Number(number))
    assert receive(server, 3) == [Number(0), Number(1), Number(2)]
    server.send(Number(7))
    assert receive(client, 1) == [Number(7)]
    assert server.heard == 1.0
    assert server.session.authenticated


def test_the_end_of_the_stream_is_an_error(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        receive(ends[1], 1)


def test_another_job_is_refused(socks: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(StrangerError, match="it belongs to another job"):
        receive(opened(socks, realms=("gpt", "bert"))[0], 0)


@pytest.mark.promise("Clusters: The pods of a job are reached by nobody else")
@pytest.mark.parametrize("side", [0, 1])
def test_another_secret_is_refused_by_both_ends(socks: tuple[socket.socket, socket.socket], side: int) -> None:
    with pytest.raises(StrangerError, match="it does not know the secret of this job"):
        receive(opened(socks, secrets=("ours", "theirs"))[side], 0)


@pytest.mark.parametrize("side", [0, 1])
def test_another_version_is_named_by_both_ends(
    socks: tuple[socket.socket, socket.socket], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Session("s", ["gpt"], serves=True)
    with monkeypatch.context() as patch:
        patch.setattr(session, "VERSION", session.VERSION + 1)
        newer = Session("s", ["gpt"], serves=False)
    client, server = (
        Connection(sock, each, NUMBERS, 15.0, 0.0) for sock, each in zip(socks, (newer, older), strict=True)
    )
    if side == 0:
        monkeypatch.setattr(session, "VERSION", session.VERSION + 1)
    with pytest.raises(VersionError, match=r"it speaks version \d+ of flk's protocol and this end version \d+"):
        receive((client, server)[side], 0)


@pytest.mark.parametrize("side", [0, 1])
def test_a_version_that_was_changed_on_the_way_is_not_believed(
    socks: tuple[socket.socket, socket.socket], side: int
) -> None:
    """No repetition helps against another version, so a launcher that believed it would leave its job."""
    changed, other = Session("s", ["gpt"], serves=side == 0), Session("s", ["gpt"], serves=side == 1)
    changed.greeting = changed.greeting[:4] + struct.pack(">H", session.VERSION + 1) + changed.greeting[6:]
    end = Connection(socks[0], other, NUMBERS, 15.0, 0.0)
    Connection(socks[1], changed, NUMBERS, 15.0, 0.0)
    with pytest.raises(StrangerError, match="does not know the secret"):
        receive(end, 0)


@pytest.mark.parametrize("copies", [[0, 0], [1], [1, 0]], ids=["repeated", "dropped", "reordered"])
def test_frames_can_not_be_repeated_dropped_or_reordered(ends: Ends, copies: list[int]) -> None:
    """By somebody on the way who does not know the secret."""
    client, server = ends
    frames = [client.session.seal(NUMBERS.encode(Number(number))) for number in range(2)]
    client.socket.send(b"".join(frames[number] for number in copies))
    with pytest.raises(StrangerError, match="authentication code"):
        receive(server, len(copies))


def test_greetings_can_not_be_sent_back(socks: tuple[socket.socket, socket.socket]) -> None:
    client = Connection(socks[0], Session("s", ["gpt"], serves=False), NUMBERS, 15.0, 0.0)
    socks[1].sendall(socks[1].recv(GREETING, socket.MSG_WAITALL))
    with pytest.raises(StrangerError):
        receive(client, 0)


@pytest.mark.parametrize("place", [5, 14, -1], ids=["lengths", "message", "code"])
def test_a_changed_frame_is_refused(ends: Ends, place: int) -> None:
    client, server = ends
    frame = bytearray(client.session.seal(NUMBERS.encode(Number(1))))
    frame[place] ^= 1
    client.socket.send(frame + bytes(1))
    with pytest.raises(ConnectionError):
        receive(server, 1)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\n", b"\n", b'{"type": "Hello"}\n'])
def test_what_is_no_greeting_is_refused_at_once(socks: tuple[socket.socket, socket.socket], text: bytes) -> None:
    server = Connection(socks[1], Session("s", ["gpt"], serves=True), NUMBERS, 15.0, 0.0)
    socks[0].send(text)
    with pytest.raises(ConnectionError, match="does not speak the protocol of this version of flk"):
        receive(server, 1)


@pytest.mark.parametrize("content", [b'["Number",{"value":"seven"}]', b'["Later",{}]'])
def test_what_is_no_message_ends_the_connection(ends: Ends, content: bytes) -> None:
    client, server = ends
    client.socket.send(client.session.seal(content))
    with pytest.raises(ConnectionError, match="sent what is not a message"):
        receive(server, 1)


def test_what_the_other_end_does_not_read_is_bounded(ends: Ends) -> None:
    def send_much() -> None:
        for number in range(100):
            ends[0].send(Number(number, "x" * (1 << 20)))

    with pytest.raises(ConnectionError, match="did not read"):
        send_much()
