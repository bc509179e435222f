"""The store of the ranks of one attempt: a TCPStore of torch that the launcher of pod 0 serves."""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flk_runtime.launcher.transport.messages import Event
from flk_runtime.launcher.transport.thread import start_thread
from flk_runtime.wire.listener import listen

_TIMEOUT = timedelta(seconds=30)  # of the server's own connection to itself


class AttemptStore:
    """An empty TCPStore on a free port of this pod.

    A launcher that has not imported torch (FLK_START=spawn) imports it when the first rank connects, in a thread of its
    own: ranks need not wait for it, and a script without torch needs no store.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        """``post`` receives the thread's exception, if it ends with one."""
        self._store: Any = None
        self._closing: socket.socket | None = None
        if "torch" in sys.modules:
            self._store = _serve()
            self.port = int(self._store.port)
            return
        listener = listen("", 0)
        self.port = int(listener.getsockname()[1])
        self._closing, closed = socket.socketpair()
        start_thread("attempt-store", lambda: self._serve_when_asked(listener, closed), post)

    def close(self) -> None:
        """Close the port, and forget what the ranks have set."""
        self._store = None
        if self._closing:
            self._closing.close()

    def _serve_when_asked(self, listener: socket.socket, closed: socket.socket) -> None:
        with closed, selectors.DefaultSelector() as selector:
            for each in (listener, closed):
                selector.register(each, selectors.EVENT_READ)
            if any(key.fileobj is closed for key, _ in selector.select()):
                listener.close()
                return
        # Before torch 2.8, libuv's server does not listen on a socket that it is given.
        self._store = _serve(self.port, master_listen_fd=listener.detach(), use_libuv=False)


def _serve(port: int = 0, **options: Any) -> Any:
    import torch.distributed as dist

    host = "0.0.0.0"  # noqa: S104 - the ranks of all pods connect to it
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, **options
    )
