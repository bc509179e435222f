"""`flk port-forward`: what each end of a connection gets, and when it is closed."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest

from flk.cli import port_forward
from flk.cli.port_forward import Forwarding
from tests.support.commands import Run
from tests.unit.flk.cli.outputs import jobs


class Pod:
    """The connection to a pod, which answers when it is told to."""

    def __init__(self) -> None:
        self.got: queue.Queue[bytes] = queue.Queue()
        self.answers: queue.Queue[bytes] = queue.Queue()
        self.closed = threading.Event()
        self.send = self.got.put
        self.close = self.closed.set

    def receive(self) -> bytes:
        return self.answers.get(timeout=60)


@pytest.mark.parametrize("sends_more", [False, True])
def test_a_client_gets_the_whole_answer_and_its_end(sends_more: bool) -> None:
    """One that has sent everything, and one that might send more, while the other thread waits for that."""
    client, connection = socket.socketpair()
    client.settimeout(20)
    pod: Any = Pod()
    forwarding = Forwarding(connection, pod)
    sending = threading.Thread(target=forwarding.send, daemon=True)
    client.sendall(b"question")
    if not sends_more:
        client.shutdown(socket.SHUT_WR)
    sending.start()
    assert pod.got.get(timeout=60) == b"question"
    assert not pod.closed.wait(0.1)
    pod.answers.put(b"answer")
    pod.answers.put(b"")
    with client, connection:
        forwarding.receive()
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""
        sending.join(60)
    assert pod.closed.is_set()


def test_several_ports(fake: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.add(fake, "running")
    opened: list[tuple[str, int, int]] = []

    def forward(access: object, target: Any, port: int, connection: socket.socket) -> None:
        opened.append((target.name, port, connection.getsockname()[1]))
        connection.close()

    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        address, port = text.split()[1].split(":")
        clients.append(socket.create_connection((address, int(port))))

    def select(self: Any, timeout: float | None = None) -> Any:
        if len(opened) == 2:
            raise KeyboardInterrupt
        return real(self, 0.01)

    clients: list[socket.socket] = []
    real = port_forward.selectors.DefaultSelector.select
    monkeypatch.setattr(port_forward.selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(port_forward, "_forward", forward)
    monkeypatch.setattr(port_forward, "note", note)
    words = ["0:8000", ":6006", "--pod", "2"]
    monkeypatch.setattr("threading.Thread.start", lambda self: self.run() if self._target is forward else start(self))
    assert run("port-forward", "gpt", *words)[0] == 130
    assert {name for name, _, _ in opened} == {"gpt-worker-2"}
    assert [text.split()[4] for text in said] == ["8000", "6006"]
    assert len({text.split()[1] for text in said} - {"127.0.0.1:6006"}) == 2
    assert {port for _, port, _ in opened} == {8000, 6006}
    for client in clients:
        client.close()


start = threading.Thread.start
