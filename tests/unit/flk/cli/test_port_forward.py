"""`flk port-forward`: what each end of a connection gets, and when it is closed."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

from flk.cli.port_forward import Forwarding


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


def test_a_client_that_has_sent_everything_gets_its_answer() -> None:
    client, connection = socket.socketpair()
    pod: Any = Pod()
    forwarding = Forwarding(connection, pod)
    sending = threading.Thread(target=forwarding.send)
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    sending.start()
    assert pod.got.get(timeout=60) == b"question"
    assert not pod.closed.wait(0.1)
    pod.answers.put(b"answer")
    pod.answers.put(b"")
    forwarding.receive()
    assert client.recv(100) == b"answer"
    assert client.recv(100) == b""
    sending.join(60)
    assert pod.closed.is_set()
    client.close()
