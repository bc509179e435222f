"""Streams on which shards of checkpoints travel, between two threads of the test."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flk_runtime.launcher.replication.messages import MESSAGES, Content, Peer, receive_shard
from flk_runtime.shared.shard_file import DATA_BEGIN, ShardError, ShardPreamble
from flk_runtime.wire import Done, Session, Stream

LENGTH = 1 << 36  # bytes of a file without content, which nobody receives as a whole
TRIES = 5


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[mmap.mmap]:
    path = tmp_path / "shard"
    path.touch()
    os.truncate(path, LENGTH)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), LENGTH) as memory:
        yield memory


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def opened(ends: tuple[socket.socket, socket.socket]) -> tuple[Peer, Peer]:
    """Streams that have greeted each other."""
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(Stream, sock, Session("s", ["gpt"], serves=serves), MESSAGES)
            for sock, serves in zip(ends, (False, True), strict=True)
        ]
        one, other = (each.result(30) for each in both)
    return one, other


def drain(sock: socket.socket) -> None:
    """Receive everything, as fast as it comes."""
    buffer = bytearray(1 << 22)
    with contextlib.suppress(OSError):
        while sock.recv_into(buffer):
            pass


@pytest.mark.parametrize("attempt", range(TRIES))
@pytest.mark.parametrize("receives", [True, False], ids=["receives", "stalls"])
def test_an_interrupted_transfer_raises_an_os_error(
    shard: mmap.mmap, ends: tuple[socket.socket, socket.socket], receives: bool, attempt: int
) -> None:
    """The thread that sends may be anywhere: in the kernel, between two pieces, or waiting for the other side."""
    ours, theirs = ends
    connection, _ = opened((ours, theirs))
    connection.set_timeout(30)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            connection.send(Content(), shard)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=send, daemon=True)]
    if receives:
        threads.append(threading.Thread(target=drain, args=(theirs,), daemon=True))
    for thread in threads:
        thread.start()
    time.sleep(0.02 + attempt * 0.004)
    number = ours.fileno()
    connection.interrupt()
    for thread in threads:
        thread.join(5)
    assert [type(error) for error in raised] == [BrokenPipeError]
    assert ours.fileno() == number, "the thread that used the connection closes it"
    connection.close()
    assert ours.fileno() == -1


def a_part(content: bytes) -> bytes:
    """The bytes of a shard whose data is ``content``."""
    data_end = DATA_BEGIN + len(content)
    preamble = ShardPreamble(7, 1, 2, 1, DATA_BEGIN, 0, 0, DATA_BEGIN, len(content), b"attempt", zlib.crc32(content))
    assert preamble.end == data_end
    return preamble.to_bytes() + content


def memory_of(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memory


def test_a_shard_is_received_into_the_file_as_it_was_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    """Messages come before and after it, the files are longer than it, and its preamble is not written yet."""
    content = a_part(os.urandom((5 << 19) + 123))
    before = b"before" * (1 << 19)
    received = memory_of(before)
    sender, receiver = opened(ends)

    def send() -> None:
        sender.send(Content(), memoryview(memory_of(content + b"not sent"))[: len(content)])
        sender.send(Done())

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    _, length = receiver.receive()
    preamble = receive_shard(receiver, received, length)
    assert receiver.receive() == (Done(), 0)
    assert preamble.to_bytes() == content[:DATA_BEGIN]
    assert received[:] == before[:DATA_BEGIN] + content[DATA_BEGIN:] + before[length:]
    thread.join()
    sender.close()
    receiver.close()


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (lambda content: content[:-1] + b"?", "its data has another checksum"),
        (lambda content: content[:30] + b"?" + content[31:], "its beginning is damaged"),
        (lambda content: content + b"more", "it has 1132 of its 1128 bytes"),
        (lambda content: content[:50], "it has 50 bytes"),
    ],
    ids=["data", "preamble", "length", "short"],
)
def test_after_a_shard_that_was_damaged_before_it_was_sent_the_connection_can_be_used(
    ends: tuple[socket.socket, socket.socket], damaged: Callable[[bytes], bytes], reason: str
) -> None:
    content = damaged(a_part(bytes(1000)))
    sender, receiver = opened(ends)
    for _ in range(2):
        sender.send(Content(), content)
    assert receiver.receive() == (Content(), len(content))
    with pytest.raises(ShardError, match=reason):
        receive_shard(receiver, mmap.mmap(-1, 4096), len(content))
    assert receiver.receive() == (Content(), len(content))
    receiver.skip_data(len(content))
    sender.send(Done())
    sender.close()
    assert receiver.receive() == (Done(), 0)
    with pytest.raises(ConnectionError, match="it closed the connection"):
        receiver.receive()
    receiver.close()
