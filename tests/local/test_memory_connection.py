"""Connections on which parts of checkpoints travel, between two threads of the test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk_runtime.launcher.memory.connection import DataConnection

LENGTH = 1 << 36  # bytes of a file without content, which nobody receives as a whole
TRIES = 5


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    path.touch()
    os.truncate(path, LENGTH)
    return path


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def drain(sock: socket.socket) -> None:
    """Receive everything, as fast as it comes."""
    buffer = bytearray(1 << 22)
    with contextlib.suppress(OSError):
        while sock.recv_into(buffer):
            pass


@pytest.mark.parametrize("attempt", range(TRIES))
@pytest.mark.parametrize("receives", [True, False], ids=["receives", "stalls"])
def test_an_interrupted_transfer_raises_an_os_error(
    part: Path, ends: tuple[socket.socket, socket.socket], receives: bool, attempt: int
) -> None:
    """The thread that sends may be anywhere: in the kernel, between two pieces, or waiting for the other side."""
    ours, theirs = ends
    connection = DataConnection(ours)
    connection.set_timeout(30)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            connection.send_file(part, LENGTH)
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


def test_a_part_is_received_into_the_file_as_it_was_sent(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages before and after it, a file that is longer than the part, and a part of more than one window."""
    monkeypatch.setattr("flk_runtime.launcher.memory.connection._WINDOW", 1 << 20)
    content = os.urandom((5 << 19) + 123)
    (tmp_path / "sent").write_bytes(content + b"not sent")
    (tmp_path / "received").write_bytes(b"before" * (1 << 19))
    sender, receiver = map(DataConnection, ends)

    def send() -> None:
        sender.send({"length": len(content)})
        sender.send_file(tmp_path / "sent", len(content))
        sender.send({"sent": True})

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    length = receiver.receive()["length"]
    receiver.receive_file(tmp_path / "received", length)
    assert receiver.receive() == {"sent": True}
    received = (tmp_path / "received").read_bytes()
    assert received[:length] == content
    assert received[length:] == (b"before" * (1 << 19))[length:]
    thread.join()
    sender.send_file(tmp_path / "sent", 1000)
    sender.close()
    with pytest.raises(ConnectionError, match="ended in the middle of a part"):
        receiver.receive_file(tmp_path / "received", length)
    receiver.close()
