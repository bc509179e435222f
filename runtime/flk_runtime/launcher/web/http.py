"""HTTP of a launcher: servers whose clients may be anybody who reaches the pod, and requests to servers in the cluster.

The requests carry a token of the pod.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from flk_runtime.wire import listen

TIMEOUT: Final = 5.0  # seconds for one request
ERRORS: Final = (OSError, http.client.HTTPException, ValueError, KeyError)  # of a request and of what is in its answer
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


def send(
    url: str, body: bytes | None, *, method: str, content_type: str, token: Path | None, authority: str | None
) -> bytes:
    """Send a request, and return the answer. Raises one of ERRORS.

    ``token`` is the file of the token, and ``authority`` the file of who has signed the certificates.
    """
    headers = {"Content-Type": content_type}
    if token:  # it is read anew each time, since the kubelet renews it
        headers["Authorization"] = f"Bearer {token.read_text().strip()}"
    request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
    context = ssl.create_default_context(cafile=authority) if url.startswith("https:") else None
    # No proxy: the server is in the cluster.
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT) as answer:
        return bytes(answer.read())
