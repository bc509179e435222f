"""Answers the ranks of this pod: where they write their parts, what is restored, where a part of it is.

A rank has the path of a Unix socket in FLK_MEMORY. It sends its requests on one connection, each a line of JSON, and
reads a line that answers each. The other side is `flk_runtime.checkpoint.memory`.
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


class Requests:
    """A server for the ranks of this pod, with a thread for each rank, since some requests wait."""

    def __init__(self, path: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """``answer`` is called in the thread of each rank. Raises OSError."""
        self.path = path
        self._answer = answer
        path.unlink(missing_ok=True)  # of a launcher that was killed
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(_BACKLOG)

    def run(self) -> None:
        """Accept connections, for ever."""
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), name="memory-requests", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as reader:
            try:
                while line := reader.readline(_LINE_LIMIT):
                    sock.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):
                return  # the rank was killed, or is no rank of flk's
