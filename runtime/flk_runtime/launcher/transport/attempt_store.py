"""The store of the ranks of one attempt: a TCPStore of torch that the launcher of pod 0 serves."""

from __future__ import annotations

import selectors
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flk_runtime.launcher.signals import start_thread
from flk_runtime.launcher.transport.messages import Event
from flk_runtime.wire.listener import LOOPBACK, listen

_TIMEOUT = timedelta(seconds=30)  # of the server's own connection to itself


class AttemptStore:
    """An empty TCPStore on a free port of this pod. It is closed with the last reference to this object.

    A launcher that has not imported torch (FLK_START=spawn) imports it when the first rank connects, in a thread of its
    own: ranks need not wait for it, and a script without torch needs no store. A store to which no rank of its attempt
    has connected keeps its thread and its port until the launcher ends.
    """

    def __init__(self, post: Callable[[Event], None], *, local: bool) -> None:
        """``post`` receives the thread's exception, if it ends with one. ``local``: all ranks are on this machine."""
        if "torch" in sys.modules and not local:
            self._store = _new()
            self.port = int(self._store.port)
            return
        listener = listen(LOOPBACK if local else "", 0)
        self.port = int(listener.getsockname()[1])
        if "torch" in sys.modules:
            self._open(listener)
        else:
            start_thread("attempt-store", lambda: self._serve(listener), post)

    def _serve(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.select()
        self._open(listener)

    def _open(self, listener: socket.socket) -> None:
        # Before torch 2.8, libuv's server does not listen on a socket that it is given.
        self._store = _new(self.port, master_listen_fd=listener.detach(), use_libuv=False)


def _new(port: int = 0, **options: Any) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        "0.0.0.0",  # noqa: S104 - the ranks of all pods connect to it
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        **options,
    )
