"""A TCP proxy that delays what it forwards."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress


class DelayingProxy:
    """Forwards TCP connections to a port of this machine, each piece of data ``delay`` seconds after its arrival."""

    def __init__(self, target: int, delay: float) -> None:
        self._target = target
        self._delay = delay
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                    threading.Thread(target=self._write, args=(sink, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self._delay, data))

    @staticmethod
    def _write(sink: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"first"
        with suppress(OSError):
            while data:
                due, data = pieces.get()
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
