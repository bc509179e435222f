"""Answers the ranks of this pod: where they write their parts, what is restored, where a part of it is.

Each request is a connection to a Unix socket: one line of JSON, and one line that answers it. A rank has the path of
the socket in FLK_MEMORY. The other side is `flk_runtime.checkpoint.memory`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_LINE_LIMIT: Final = 1 << 16  # bytes
_BACKLOG: Final = 256
_TIMEOUT: Final = 10.0  # seconds in which a rank sends its request and reads the answer


class Requests:
    """A server for the ranks of this pod, with a thread for each request, since some of them wait."""

    def __init__(self, path: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """``answer`` is called in the thread of each request. Raises OSError."""
        self.path = path
        self._answer = answer
        path.unlink(missing_ok=True)  # of a launcher that was killed
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)

    def run(self) -> None:
        """Accept requests, for ever."""
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), name="memory-request", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(_TIMEOUT)
            try:
                with sock.makefile("rb") as reader:
                    request = json.loads(reader.readline(_LINE_LIMIT))
                sock.sendall(json.dumps(self._answer(request)).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):
                return  # the rank was killed, and another request of it makes no sense
