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
