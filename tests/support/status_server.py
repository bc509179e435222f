"""The status server of Kubeflow Trainer, to which the launcher of a TrainJob sends the progress."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StatusServer:
    """Keeps what is posted, and answers with `code`. It serves inside its ``with`` block."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        """Pairs of what a client has sent: its authorization, and the status."""
        self.code = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.got.append((self.headers["Authorization"], body["trainerStatus"]))
                self.send_response(outer.code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/apis/x"

    def __enter__(self) -> StatusServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
