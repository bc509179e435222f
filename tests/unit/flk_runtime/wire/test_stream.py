"""Streams: messages with bulk data behind them, whose bytes are authenticated too."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from flk_runtime.wire import Registry, Session, StrangerError, Stream

DATA = os.urandom((5 << 19) + 123)


@dataclass(frozen=True)
class Put:
    number: int


MESSAGES: Registry[Put] = Registry([Put])
Ends = tuple[Stream[Put], Stream[Put]]


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def opened(client: socket.socket, server: socket.socket) -> Ends:
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(Stream, sock, Session("s", ["gpt"], serves=serves), MESSAGES)
            for sock, serves in ((client, False), (server, True))
        ]
        one, other = (each.result(30) for each in both)
    return one, other


@pytest.fixture
def ends() -> Iterator[Ends]:
    client, server = opened(*pair())
    yield client, server
    client.close()
    server.close()


@pytest.fixture
def through() -> Iterator[Callable[[int], Ends]]:
    """A client and a server with somebody in the middle, who flips a bit of the byte at a place in what is sent."""
    socks: list[socket.socket] = []

    def between(place: int) -> Ends:
        (client, one), (two, server) = pair(), pair()
        socks.extend((client, one, two, server))

        def forward(source: socket.socket, sink: socket.socket, place: int) -> None:
            position = 0
            while data := bytearray(source.recv(1 << 16)):
                if position <= place < position + len(data):
                    data[place - position] ^= 1
                position += len(data)
                sink.sendall(data)
            sink.close()

        for source, sink, at in ((one, two, place), (two, one, -1)):
            threading.Thread(target=_quietly, args=(forward, source, sink, at), daemon=True).start()
        return opened(client, server)

    yield between
    for sock in socks:
        sock.close()


def _quietly(function: Callable[..., None], *arguments: object) -> None:
    try:
        function(*arguments)
    except OSError:
        return


def test_messages_and_bulk_data_arrive_as_they_were_sent(ends: Ends) -> None:
    client, server = ends
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [client.send(Put(1), DATA), client.send(Put(2)), client.send(Put(3), b"xyz")])
        assert server.receive() == (Put(1), len(DATA))
        beginning, rest = bytearray(100), bytearray(len(DATA) - 100)
        pieces = sum(len(piece) for piece in server.receive_data(memoryview(beginning), memoryview(rest)))
        assert pieces == len(DATA)
        assert beginning + rest == DATA
        assert server.receive() == (Put(2), 0)
        message, length = server.receive()
        server.skip_data(length)
        server.send(Put(4))
        assert client.receive() == (Put(4), 0)
        sending.result(30)
    assert message == Put(3)


@pytest.mark.parametrize("place", [len(DATA) // 2, len(DATA) - 1], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("skips", [False, True], ids=["received", "skipped"])
def test_a_flipped_bit_of_bulk_data_is_refused(through: Callable[[int], Ends], place: int, skips: bool) -> None:
    probe = Session("s", ["gpt"], serves=True)
    client, server = through(len(probe.greeting) + len(b'["Put",{"number":1}]') + 44 + place)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, Put(1), DATA)
        _, length = server.receive()
        take = server.skip_data if skips else server.receive_bytes
        with pytest.raises(StrangerError, match="changed on its way"):
            take(length)
        sending.result(30)


def test_an_end_that_closes_the_connection_is_named(ends: Ends) -> None:
    client, server = ends
    client.close()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        server.receive()


def test_a_link_on_which_a_piece_takes_longer_than_the_timeout_makes_progress() -> None:
    class Slow(socket.socket):
        """A socket that sends some bytes within its timeout."""

        def send(self, data: Any, flags: int = 0, /) -> int:
            with memoryview(data)[: 1 << 16] as taken:
                return super().send(taken)

        def sendall(self, data: Any, flags: int = 0, /) -> None:
            raise TimeoutError("timed out")

    one, other = pair()
    client, server = opened(Slow(fileno=one.detach()), other)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, Put(1), DATA)
        message, length = server.receive()
        assert (message, server.receive_bytes(length)) == (Put(1), DATA)
        sending.result(30)
    client.close()
    server.close()
