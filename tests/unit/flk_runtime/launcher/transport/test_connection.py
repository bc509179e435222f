"""Connections of the rendezvous: messages as lines, authentication codes, and limits."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from flk_runtime.launcher import authentication
from flk_runtime.launcher.transport.connection import PLAIN_LIMIT, Connection
from flk_runtime.launcher.transport.messages import Heartbeat, Hello, Leave, Message, SuccessReport, encode

HELLO = Hello("gpt", "uid", 1, 2, "a1b2", 1795320052.5, "nonce")


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield Connection(one, 15.0, 0.0), Connection(other, 15.0, 0.0)


def received(connection: Connection, count: int) -> list[Message]:
    connection.socket.settimeout(10)  # the test waits for what has been sent
    messages: list[Message] = []
    while len(messages) < count:
        messages += connection.receive(1.0)
    return messages


def sealed(ends: tuple[Connection, Connection], secret: str = "s", other: str = "s") -> tuple[Connection, Connection]:
    member, leader = ends
    member.seal(authentication.session_key(secret, HELLO.session("leader", "n")), "member", "leader")
    leader.seal(authentication.session_key(other, HELLO.session("leader", "n")), "leader", "member")
    return ends


def test_messages_arrive_in_order(ends: tuple[Connection, Connection]) -> None:
    member, leader = sealed(ends)
    for number in range(3):
        member.send(SuccessReport(number))
    assert received(leader, 3) == [SuccessReport(0), SuccessReport(1), SuccessReport(2)]
    leader.send(Heartbeat())
    assert received(member, 1) == [Heartbeat()]
    assert leader.heard == 1.0


def test_nothing_to_read_is_no_error(ends: tuple[Connection, Connection]) -> None:
    assert list(ends[0].receive(1.0)) == []
    assert ends[0].heard == 0.0


def test_the_end_of_the_stream_is_an_error(ends: tuple[Connection, Connection]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        received(ends[1], 1)


def test_another_secret_is_refused(ends: tuple[Connection, Connection]) -> None:
    member, leader = sealed(ends, "ours", "theirs")
    member.send(Leave())
    with pytest.raises(ConnectionError, match="does not know the secret of this job"):
        received(leader, 1)


def test_a_line_without_a_code_is_refused(ends: tuple[Connection, Connection]) -> None:
    member, leader = sealed(ends)
    member.socket.send(encode(Leave()) + b"\n")
    with pytest.raises(ConnectionError, match="does not know the secret of this job"):
        received(leader, 1)


@pytest.mark.parametrize("copies", [[0, 0], [1], [1, 0]], ids=["repeated", "dropped", "reordered"])
def test_lines_can_not_be_repeated_dropped_or_reordered(ends: tuple[Connection, Connection], copies: list[int]) -> None:
    """By somebody on the way who does not know the secret."""
    member, leader = sealed(ends)
    key = authentication.session_key("s", HELLO.session("leader", "n"))
    lines = [encode(SuccessReport(number)) for number in range(2)]
    coded = [authentication.code(key, "member", n, line).encode() + line + b"\n" for n, line in enumerate(lines)]
    member.socket.send(b"".join(coded[number] for number in copies))
    with pytest.raises(ConnectionError, match="does not know the secret of this job"):
        received(leader, len(copies))


def test_a_line_can_not_be_sent_back(ends: tuple[Connection, Connection]) -> None:
    member, leader = sealed(ends)
    leader.send(Leave())
    member.socket.settimeout(10)
    member.socket.send(member.socket.recv(4096))
    with pytest.raises(ConnectionError, match="does not know the secret of this job"):
        received(leader, 1)


def test_a_long_line_is_refused_before_the_other_side_is_known(ends: tuple[Connection, Connection]) -> None:
    member, leader = ends
    member.socket.send(b"x" * (PLAIN_LIMIT + 1))
    with pytest.raises(ConnectionError, match="more than 4096 bytes"):
        received(leader, 1)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\n", b"\n"])
def test_what_is_no_message_is_refused(ends: tuple[Connection, Connection], text: bytes) -> None:
    ends[0].socket.send(text)
    with pytest.raises(ConnectionError, match="not a message"):
        received(ends[1], 1)


def test_what_the_other_side_does_not_read_is_bounded(ends: tuple[Connection, Connection]) -> None:
    def send_much() -> None:
        for _ in range(100):
            ends[0].send(Heartbeat({"text": "x" * (1 << 20)}))

    with pytest.raises(ConnectionError, match="did not read"):
        send_much()
