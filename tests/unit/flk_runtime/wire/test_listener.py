"""Listening sockets: IPv6 and IPv4 at once, or one address; and what cannot be accepted."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from flk_runtime.wire import listen, serve
from flk_runtime.wire import listener as listener_module


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("name", ["", "::"])
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_all_addresses_are_those_of_ipv6_and_ipv4(name: str, address: str) -> None:
    with listen(name, 0) as listener, socket.create_connection((address, listener.getsockname()[1])) as client:
        assert client.getpeername()[0] == address


def test_where_there_is_no_ipv6_it_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen("", 0) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        assert listener.family == socket.AF_INET


def test_one_address_is_the_only_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


class Busy:
    """A listener whose calls of accept raise these errors, one after the other, and then say that it is closed."""

    def __init__(self, *errors: int) -> None:
        self.errors = [*errors, errno.EBADF]

    def accept(self) -> None:
        raise OSError(self.errors.pop(0), "accept")


def test_a_connection_that_cannot_be_accepted_takes_a_pause_and_not_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(listener_module.time, "sleep", pauses.append)
    busy: Any = Busy(errno.EMFILE, errno.ECONNABORTED, errno.EMFILE)
    serve(busy, pytest.fail, "nobody")
    assert (len(pauses), busy.errors) == (2, [])  # none for the end that has gone


def test_a_connection_for_which_no_thread_can_be_made_is_closed_and_later_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a limit of processes, which counts threads too."""
    served: list[str] = []
    start, failing = threading.Thread.start, [RuntimeError("can't start new thread")]

    def limited(thread: threading.Thread) -> None:
        if thread.name == "limited" and failing:
            raise failing.pop()
        start(thread)

    def handle(connection: socket.socket) -> None:
        with connection:
            served.append(threading.current_thread().name)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with listen("127.0.0.1", 0) as listener:
        threading.Thread(target=serve, args=(listener, handle, "limited"), daemon=True).start()
        for _ in range(2):
            with socket.create_connection(listener.getsockname()) as client:
                assert client.recv(1) == b"", "it is closed"
        assert served == ["limited"]
        listener.shutdown(socket.SHUT_RDWR)
