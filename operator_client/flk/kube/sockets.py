"""WebSockets of the API server: commands in containers (`exec`) and connections to pods (`port-forward`).

The first byte of each message is the number of a channel. The protocols are those of kubectl:
https://kubernetes.io/docs/reference/using-api/api-concepts and, for v5, KEP-4006.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
import websocket

from flk.errors import ApiError, UnreachableError
from flk.kube.credentials import Access
from flk.kube.errors import error_from_response
from flk.kube.resources import Target

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_EXEC: Final = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_PORT_FORWARD: Final = ["v4.channel.k8s.io"]
_CONNECT: Final = 10.0  # seconds


class RemoteCommand:
    """A command that runs in a container. One thread may read while another writes."""

    def __init__(self, access: Access, target: Target, command: Sequence[str], *, container: str, tty: bool) -> None:
        """Start the command. Raises ApiError if the API server refuses it."""
        flags = {"container": container, "stdin": "true", "stdout": "true", "stderr": str(not tty).lower()}
        pairs = [*flags.items(), ("tty", str(tty).lower()), *(("command", word) for word in command)]
        self._socket = _open(access, target, pairs, _EXEC)

    def run(self, write: Callable[[int, bytes], None]) -> int:
        """Hand on the output, with STDOUT or STDERR, until the command ends; return its exit code.

        Raises UnreachableError if the connection breaks before.
        """
        while True:
            data = _receive(self._socket)
            if data is None:
                raise UnreachableError("the connection to the container ended before the command did")
            if data[:1] == bytes([STATUS]):
                return _exit_code(json.loads(data[1:]))
            if data[1:]:
                write(data[0], data[1:])

    def send(self, data: bytes) -> None:
        """Send input to the command."""
        self._socket.send_binary(bytes([STDIN]) + data)

    def end_input(self) -> None:
        """Close the command's input, where the server can do that."""
        if self._socket.getsubprotocol() == _EXEC[0]:
            self._socket.send_binary(bytes([CLOSE, STDIN]))

    def resize(self, columns: int, rows: int) -> None:
        """Tell the command's terminal its new size."""
        self._socket.send_binary(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class PodConnection:
    """A TCP connection to a port of a pod."""

    def __init__(self, access: Access, target: Target, port: int) -> None:
        """Open the connection. Raises ApiError if the API server refuses it."""
        self._socket = _open(access, target, [("ports", str(port))], _PORT_FORWARD)
        self._begun = {0: False, 1: False}

    def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises UnreachableError if nothing listens on the port."""
        while True:
            data = _receive(self._socket)
            if data is None:
                return b""
            channel, content = data[0], data[1:]
            if not self._begun.get(channel, True):
                self._begun[channel] = True  # the first message of a channel is the number of the port
                content = content[struct.calcsize("<H") :]
            if channel == 1 and content:
                raise UnreachableError(content.decode(errors="replace"))
            if content:
                return content

    def send(self, data: bytes) -> None:
        """Send bytes to the pod."""
        self._socket.send_binary(b"\0" + data)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _receive(connection: Any) -> bytes | None:
    """Return the next message, None at the end of the connection."""
    try:
        operation, data = connection.recv_data()
    except (websocket.WebSocketException, OSError):
        return None
    return None if operation == websocket.ABNF.OPCODE_CLOSE else bytes(data)


def _open(access: Access, target: Target, pairs: Sequence[tuple[str, str]], protocols: Sequence[str]) -> Any:
    url = f"ws{access.server.removeprefix('http')}{target.path}?{urlencode(pairs)}"
    for attempt in (1, 2):
        credentials = access.headers()
        try:
            return _connect(access, url, credentials, protocols)
        except websocket.WebSocketBadStatusException as error:
            if error.status_code == 401 and attempt == 1:
                access.renew(credentials)
                continue
            body = error.resp_body or b""
            raise error_from_response(error.status_code, body, "create", target, access.context) from None
        except (websocket.WebSocketException, OSError) as error:
            raise UnreachableError(f"the API server {access.server} cannot be reached: {error}") from None
    raise ApiError(f"the API server {access.server} refuses the connection")


def _connect(access: Access, url: str, headers: urllib3.HTTPHeaderDict, protocols: Sequence[str]) -> Any:
    options = access.pool.connection_pool_kw
    secure: dict[str, Any] = {}
    if url.startswith("wss:"):
        secure = {"context": options["ssl_context"]}
        if options.get("server_hostname"):
            secure["server_hostname"] = options["server_hostname"]
    proxy = getattr(access.pool, "proxy", None)
    through = {"http_proxy_host": proxy.host, "http_proxy_port": proxy.port, "proxy_type": "http"} if proxy else {}
    connection = websocket.create_connection(
        url,
        timeout=_CONNECT,
        header=[f"{name}: {value}" for name, value in headers.iteritems()],
        subprotocols=list(protocols),
        sslopt=secure,
        suppress_origin=True,
        **(through or {"http_no_proxy": ["*"]}),
    )
    connection.settimeout(None)
    return connection


def _exit_code(status: Any) -> int:
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause.get("message") or 1)
    raise ApiError(f"the command could not be run: {' '.join(str(status.get('message') or status).split())}")
