"""TCP ports that nothing else on this machine takes between their choice and their use."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports() -> Iterator[Callable[[], int]]:
    """A function that returns a new port at each call; the ports are held until the end of the block.

    A port is held by a socket that is bound and does not listen. The kernel then gives the port to no connection and to
    no program that asks for any port, while a server that sets SO_REUSEADDR, as servers do, can listen on it.
    """
    with ExitStack() as sockets:

        def hold() -> int:
            holder = sockets.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            return int(holder.getsockname()[1])

        yield hold
