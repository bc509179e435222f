"""The HTTP servers of a launcher, whose clients may be anybody who reaches the pod."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from typing import Any, Final

from flk_runtime.wire import listen

_CLIENTS: Final = 16  # connections that are served at once; others are closed


class PodServer(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6, where the pod has both. Clients cannot have it keep many threads, or fill a log."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.BoundedSemaphore(_CLIENTS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        self.socket.close()
        self.socket = listen(*self.server_address)
        self.server_port = int(self.socket.getsockname()[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a request that has failed: a client that resets its connection would be a traceback."""
