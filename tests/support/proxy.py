"""TCP proxies: one that delays what it forwards, and one that cuts every connection after some seconds."""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from contextlib import suppress


class _Proxy:
    """Listens on a port of this machine, and connects each client to an address; its subclasses say how."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._connect, args=(self._server.accept()[0],), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward what the two ends of a connection send each other."""
        raise NotImplementedError


class CuttingProxy(_Proxy):
    """Forwards TCP connections to an address, and cuts each of them silently after ``seconds``."""

    def __init__(self, target: tuple[str, int], seconds: float) -> None:
        self._seconds = seconds
        self.cut = 0  # connections that were still open
        super().__init__(target)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        until = time.monotonic() + self._seconds
        with suppress(OSError), client, server:
            other = {client: server, server: client}
            while (left := until - time.monotonic()) > 0:
                for source in select.select(list(other), [], [], left)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    other[source].sendall(data)
            self.cut += 1
            for end in other:  # the peers see a reset, not an end
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class DelayingProxy(_Proxy):
    """Forwards TCP connections to a port of this machine, each piece of data ``delay`` seconds after its arrival."""

    def __init__(self, target: int, delay: float) -> None:
        self._delay = delay
        super().__init__(("127.0.0.1", target))

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        threads = []
        for source, sink in ((client, server), (server, client)):
            pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threads.append(threading.Thread(target=self._read, args=(source, pieces), daemon=True))
            threads.append(threading.Thread(target=self._write, args=(sink, pieces), daemon=True))
        with client, server:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

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
