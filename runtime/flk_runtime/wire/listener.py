"""Listening sockets."""

from __future__ import annotations

import socket
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_ALL: Final = ("", "::")  # names of all addresses
_BACKLOG: Final = 4096  # connections that wait to be accepted


def listen(address: str, port: int) -> socket.socket:
    """Listen on ``port`` (0: any free one) of an address; on all addresses, IPv6 and IPv4, if it is empty.

    Raises OSError.
    """
    if address not in _ALL:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)
