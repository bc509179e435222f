"""Listening sockets."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
_ALL: Final = ("", "::")  # names of all addresses
_BACKLOG: Final = 4096  # connections that wait to be accepted
_PAUSE: Final = 0.1  # seconds
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED: Final = (errno.EBADF, errno.ENOTSOCK, errno.EINVAL)  # errors of a descriptor that is none, or another one


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


def accept(listener: socket.socket) -> tuple[socket.socket, Any] | None:
    """Accept a connection, and return it with its address; None if there is none within the listener's timeout.

    Returns None if the other end has gone again, and after a pause if no descriptor is free: the connection that waits
    would have a loop use a whole core until there is one. Raises OSError only if the listener is closed.
    """
    try:
        return listener.accept()
    except (TimeoutError, BlockingIOError):
        return None
    except OSError as error:
        if error.errno in _CLOSED:
            raise
        if error.errno in _EXHAUSTED:
            time.sleep(_PAUSE)
        return None


def serve(listener: socket.socket, handle: Callable[[socket.socket], None], name: str) -> None:
    """Call ``handle`` with each connection that arrives, in a thread with this name, until the listener is closed.

    It is for Unix sockets, which only this pod reaches. A connection is closed where no thread can be made for it: at a
    limit of processes, which its other end may outlast.
    """
    while True:
        try:
            accepted = accept(listener)
        except OSError:
            return
        if accepted is None:
            continue
        try:
            threading.Thread(target=handle, args=accepted[:1], name=name, daemon=True).start()
        except RuntimeError:
            accepted[0].close()
            time.sleep(_PAUSE)
