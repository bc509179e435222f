"""Connections of strangers, who cost little and keep nobody out, and of ends that belong to the job."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from flk_runtime.wire import Acceptor, Connection, Registry, Session, Stream, acceptor, listen, session


@dataclass(frozen=True)
class Put:
    number: int


MESSAGES: Registry[Put] = Registry([Put])
Start = Callable[..., tuple[str, int]]


@pytest.fixture
def log() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def start(log: queue.SimpleQueue[str]) -> Iterator[Start]:
    """Starts an acceptor with this method and its arguments, and returns its address."""
    with contextlib.ExitStack() as stack:

        def serve(method: Callable[..., None], *arguments: object) -> tuple[str, int]:
            listener = listen("127.0.0.1", 0)
            address = listener.getsockname()
            served = Acceptor(listener, lambda: Session("s", ["gpt"], serves=True), MESSAGES, log.put)
            thread = threading.Thread(target=method, args=(served, *arguments))
            thread.start()
            stack.callback(thread.join)
            stack.callback(served.close)
            return address  # type: ignore[no-any-return]

        yield serve


def connected(address: tuple[str, int], secret: str = "s") -> Stream[Put]:
    return Stream(socket.create_connection(address), Session(secret, ["gpt"], serves=False), MESSAGES, 60.0)


def test_an_end_of_the_job_is_handed_over_with_all_that_it_has_sent(start: Start) -> None:
    """Its first message, the bulk data behind it, and later ones may arrive together."""
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def handle(stream: Stream[Put], address: str) -> None:
        for _ in range(2):
            message, length = stream.receive()
            got.put((address, message, stream.receive_bytes(length)))
        stream.send(Put(3))

    client = connected(start(Acceptor.serve, handle, "peer"))
    data = bytes(range(256)) * 4000
    client.send(Put(1), data)
    client.send(Put(2), b"more")
    assert [got.get(timeout=60) for _ in range(2)] == [
        ("127.0.0.1", Put(1), data),
        ("127.0.0.1", Put(2), b"more"),
    ]
    assert client.receive() == (Put(3), 0)
    with pytest.raises(ConnectionError):
        client.receive()  # the thread has ended
    client.close()


def taken(start: Start) -> tuple[tuple[str, int], queue.SimpleQueue[Put]]:
    got: queue.SimpleQueue[Put] = queue.SimpleQueue()

    def take(connection: Connection[Put], address: str, message: Put) -> None:
        connection.close()
        got.put(message)

    return start(Acceptor.run, take), got


def test_the_oldest_stranger_makes_room(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "STRANGERS", 3)
    address, got = taken(start)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for number in range(5):
            client = connected(address)
            client.send(Put(number))
            assert got.get(timeout=60) == Put(number)
            client.close()
        greeting = len(Session("s", [], serves=True).greeting)
        first = b"".join(iter(lambda: strangers[0].recv(100), b""))
        assert len(first) == greeting, "it is closed after the greeting"


def test_a_stranger_that_sends_a_byte_now_and_then_is_closed(
    start: Start, log: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole handshake has a deadline, and not each byte of it."""
    monkeypatch.setattr(acceptor, "HANDSHAKE", 0.2)
    address, _ = taken(start)
    greeting = Session("s", ["gpt"], serves=False).greeting
    with socket.create_connection(address) as slow:
        slow.settimeout(0.05)  # all of its greeting would take two seconds
        left = iter(greeting)
        with contextlib.suppress(ConnectionError):
            while True:
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(100):
                        break
                slow.send(bytes([next(left)]))
    assert log.get(timeout=60) == ("refused a connection from 127.0.0.1: it has not authenticated itself within 0 s")


def test_all_refused_connections_are_one_line(
    start: Start, log: queue.SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of another version, which a stranger on the way may repeat."""
    address, got = taken(start)
    with monkeypatch.context() as patch:
        patch.setattr(session, "VERSION", session.VERSION + 1)
        newer = Session("s", ["gpt"], serves=False).greeting
    stranger = Session("other", ["gpt"], serves=False).greeting
    for data in [newer, stranger, b"GET / HTTP/1.1\r\n\r\n", newer[:10], stranger + bytes(2000)] * 4:
        with socket.create_connection(address) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while client.recv(100):
                    pass
    peer = connected(address)
    peer.send(Put(1))
    assert got.get(timeout=60) == Put(1)
    peer.close()
    assert "speaks version" in log.get(timeout=60)
    assert log.empty()


def test_a_replayed_greeting_and_a_long_frame_are_refused_before_they_are_read(
    start: Start, log: queue.SimpleQueue[str]
) -> None:
    address, got = taken(start)
    with socket.create_connection(address) as client:
        client.sendall(Session("s", ["gpt"], serves=False).greeting + b"\xff" * 100)
        with contextlib.suppress(ConnectionError):
            while client.recv(100):
                pass
    assert "more than 65536 bytes" in log.get(timeout=60)
    assert got.empty()


def test_the_greeting_of_a_server_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has got the address of a pod keeps nobody waiting."""
    monkeypatch.setattr("flk_runtime.wire.stream._HANDSHAKE_TIMEOUT", 0.2)
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        for byte in Session("s", ["gpt"], serves=True).greeting * 100:
            with contextlib.suppress(OSError):
                theirs.send(bytes([byte]) if byte else b"\0")
            if ended.wait(0.05):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError, match="was silent"):
        Stream(ours, Session("s", ["gpt"], serves=False), MESSAGES)
    ended.set()
    thread.join()
    theirs.close()
