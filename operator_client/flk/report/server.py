"""Serve the page of a report on this machine while a job runs: read-only, to whoever knows the address only."""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from flk.errors import FlkError
from flk.report.model import Report
from flk.report.page import content_of, page_of

HOST: Final = "127.0.0.1"
EVERY: Final = 5  # seconds after which the page renews itself
Collect = Callable[[], Sequence[Report]]


class ReportServer:
    """An HTTP server for one page. Only GET requests whose path has the token are answered, and only by this host."""

    def __init__(self, collect: Collect, script: str | None, port: int = 0) -> None:
        """``port`` 0 chooses a free one. Raises OSError if the port is taken."""
        self._collect, self._script = collect, script
        self._lock = threading.Lock()
        self._reports: Sequence[Report] = ()
        self._read = 0.0
        self._token = secrets.token_urlsafe(24)
        handler = type("Handler", (_Handler,), {"server_of_page": self})
        self._server = _Server((HOST, port), handler)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Answer requests until `close` or an interrupt."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Close the port."""
        self._server.server_close()

    def answer(self, host: str, path: str) -> tuple[int, str]:
        """Return status and text of the answer to a GET request. Raises FlkError if the job cannot be read."""
        # A page of another site, whose name resolves to this machine, would send its own name.
        if host not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            return 403, "this address is for this machine only"
        for name in ("", "content"):
            if hmac.compare_digest(path.encode(), f"/{self._token}/{name}".encode()):
                reports = self._current()
                if name:
                    return 200, content_of(reports, charts=self._script is not None)
                return 200, page_of(reports, self._script, refresh=EVERY)
        return 404, "there is no such page; the address that flk has printed has it"

    def _current(self) -> Sequence[Report]:
        """Return the reports, read anew if they are old. Several windows share what was read."""
        with self._lock:
            if not self._reports or time.monotonic() - self._read >= EVERY - 1:
                self._reports = self._collect()
                self._read = time.monotonic()
            return self._reports


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print a traceback, but not if the window was closed before it had its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server_of_page: ReportServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "flk", ""
    timeout = 30

    def do_GET(self) -> None:
        try:
            status, text = self.server_of_page.answer(self.headers.get("Host", ""), self.path)
        except FlkError as error:
            status, text = 503, str(error)
        self._send(status, text)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer every other method, and what is no request."""
        self.close_connection = True
        self._send(405 if code == 501 else code, "only GET is answered here")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the address has the token."""

    def _send(self, status: int, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
