"""Listening sockets: IPv6 and IPv4 at once, or one address."""

from __future__ import annotations

import socket

import pytest

from flk_runtime.wire import listen


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
