"""A real S3 server on this machine: versitygw over a folder, and a proxy that makes it slow or fail."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.requirements import unavailable

KEY, SECRET = "some-key", "some-secret"


class S3Server:
    """versitygw with one bucket, ``bucket``, whose objects are files below ``folder``.

    A test that needs it is skipped where it is not installed.
    """

    def __init__(self, folder: Path, port: int) -> None:
        if not shutil.which("versitygw"):
            unavailable("versitygw is not installed, the S3 server of CONTRIBUTING.md")
        self.folder = folder / "bucket"
        self.folder.mkdir(parents=True)
        self.port = port
        self._root = folder
        self.start()

    @property
    def variables(self) -> dict[str, str]:
        """Environment of a client."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
        }

    @property
    def command(self) -> list[str]:
        return ["versitygw", "--port", f"127.0.0.1:{self.port}", "posix", str(self._root)]

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        environment = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
        output = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, env=environment, stdout=output, stderr=output)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError("versitygw does not accept connections")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


# Answers of the proxy in place of the server: status and body.
ANSWERS = {
    "unavailable": (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "expired": (400, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"),
}
DELAY = 0.3  # seconds that a slow server takes for each request


class FaultyProxy:
    """An HTTP proxy in front of a server, which does what the file ``mode`` says: a key of ANSWERS, or ``slow``."""

    def __init__(self, server: S3Server, mode: Path) -> None:
        self.variables = dict(server.variables)
        self.mode = mode
        mode.write_text("")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each body would wait 40 ms for the client to acknowledge its headers

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(1 << 16)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                what = proxy.mode.read_text()
                if what == "slow":
                    time.sleep(DELAY)
                if what in ANSWERS:
                    self._reply(ANSWERS[what][0], {}, ANSWERS[what][1])
                    return
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
                self._reply(answer.status, dict(answer.getheaders()), content)
                connection.close()

            def _reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                self.wfile.write(content)
                self.wfile.flush()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.variables["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
