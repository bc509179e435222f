"""WebSockets of the API server: commands in containers (`exec`) and connections to pods (`port-forward`).

They are opened with the certificates, the proxy and the credentials of all other requests, which the package kubernetes
cannot do, and read message by message: the package gathers all that has come before it hands on any.

The first byte of each message is the number of a channel. kubectl uses the same protocols:
https://kubernetes.io/docs/reference/using-api/api-concepts and, for v5, KEP-4006.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import urllib3
import websocket
from urllib3.exceptions import HTTPError

from flk.errors import ApiError, UnreachableError
from flk.kube.credentials import Access
from flk.kube.errors import error_from_connection, error_from_response
from flk.kube.resources import RequestTarget
from flk_runtime.contract import foreign
from flk_runtime.contract.values import dataclass

_PORT_DATA, _PORT_ERROR = 0, 1
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_EXEC: Final = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_PORT_FORWARD: Final = ["v4.channel.k8s.io"]
_CONNECT: Final = 10.0  # seconds without an answer while a connection is opened
# Options of TCP with which the system finds within a minute that the other end of a silent connection is gone.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_NO_CONTAINER: Final = re.compile(r'container not found \("([^"]*)"\)')
_NO_PROGRAM: Final = re.compile(r'exec: "([^"]*)": (executable file not found in \$PATH|[a-z ]+)')
SIZE_LIMIT: Final = 1 << 26  # bytes of output that `execute` holds


@dataclass(frozen=True)
class Executed:
    """How a command in a container ended."""

    code: int
    stdout: bytes
    stderr: bytes

    def answer(self, who: str) -> Any:
        """Return the JSON that the command has printed. Raises ApiError, with its last line, if ``who`` gave none."""
        try:
            return foreign.parse(self.stdout, SIZE_LIMIT)
        except foreign.ForeignError:
            words = (self.stderr or self.stdout).decode(errors="replace").strip().splitlines()
            raise ApiError(f"{who} does not answer: {words[-1] if words else f'exit code {self.code}'}") from None


def execute(
    access: Access, target: RequestTarget, command: Sequence[str], *, container: str, timeout: float
) -> Executed:
    """Run a command without input and wait until it has ended, at most ``timeout`` seconds.

    ``target`` is the subresource ``exec`` of a pod. Raises ForbiddenError without the right to create it,
    UnreachableError if the connection breaks, the time is over or the output is larger than 64 MiB, ApiError if the
    command cannot start.
    """
    output = {STDOUT: bytearray(), STDERR: bytearray()}

    def write(channel: int, data: bytes) -> None:
        output[channel] += data
        if sum(map(len, output.values())) > SIZE_LIMIT:
            raise UnreachableError(f"{target.name} wrote more than {SIZE_LIMIT >> 20} MiB")

    with contextlib.closing(RemoteCommand(access, target, command, container=container, stdin=False)) as remote:
        code = remote.run(write, timeout=timeout)
    return Executed(code, bytes(output[STDOUT]), bytes(output[STDERR]))


class RemoteCommand:
    """A command that runs in a container. One thread may read while another writes."""

    def __init__(
        self,
        access: Access,
        target: RequestTarget,
        command: Sequence[str],
        *,
        container: str,
        stdin: bool = True,
        tty: bool = False,
    ) -> None:
        """Start the command. Raises ApiError if the API server refuses it."""
        flags = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
        pairs = [("container", container), *((name, str(value).lower()) for name, value in flags.items())]
        self._target, self._began = target, time.monotonic()
        self._socket = _open(access, target, [*pairs, *(("command", word) for word in command)], _EXEC)

    def run(self, write: Callable[[int, bytes], None], *, timeout: float | None = None) -> int:
        """Hand on the output, with STDOUT or STDERR, until the command ends; return its exit code.

        Raises UnreachableError if the connection breaks before, or ``timeout`` seconds after it began to open.
        """
        ends = None if timeout is None else self._began + timeout
        while True:
            if ends is not None:
                self._socket.settimeout(max(0.001, ends - time.monotonic()))
            data = _receive(self._socket)
            if ends is not None and time.monotonic() >= ends:
                raise UnreachableError(f"the command in {self._target.name} did not end within {timeout:g} seconds")
            if data is None:
                raise UnreachableError(f"the connection to {self._target.name} ended before the command did")
            if data[:1] == bytes([STATUS]):
                try:
                    return _exit_code(foreign.parse_object(data[1:]))
                except foreign.ERRORS:
                    raise ApiError("the API server does not say how the command ended") from None
            if data[1:] and data[0] in (STDOUT, STDERR):
                write(data[0], data[1:])

    def send(self, data: bytes) -> None:
        """Send input to the command."""
        self._socket.send_binary(bytes([STDIN]) + data)

    def end_input(self) -> None:
        """Close the command's input, where the server can do that (Kubernetes 1.30)."""
        if self._socket.getsubprotocol() == _EXEC[0]:
            self._socket.send_binary(bytes([CLOSE, STDIN]))

    def resize(self, columns: int, rows: int) -> None:
        """Tell the command's terminal its new size."""
        self._socket.send_binary(bytes([RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())

    def close(self) -> None:
        """Close the connection."""
        _close(self._socket)


class PodConnection:
    """A TCP connection to a port of a pod. One thread may receive while another sends."""

    def __init__(self, access: Access, target: RequestTarget, port: int) -> None:
        """Open the connection. Raises ApiError if the API server refuses it."""
        self._socket = _open(access, target, [("ports", str(port))], _PORT_FORWARD)
        self._begun: set[int] = set()  # channels that have named their port, each in its first message

    def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises UnreachableError if nothing listens on the port."""
        while data := _receive(self._socket):
            channel, content = data[0], data[1:]
            if channel not in self._begun:
                self._begun.add(channel)
            elif channel == _PORT_ERROR:
                raise UnreachableError(content.decode(errors="replace"))
            elif channel == _PORT_DATA and content:
                return content
        return b""

    def send(self, data: bytes) -> None:
        """Send bytes to the pod."""
        self._socket.send_binary(bytes([_PORT_DATA]) + data)

    def close(self) -> None:
        """Close the connection, also while another thread receives."""
        _close(self._socket)


def _close(connection: Any) -> None:
    transport = connection.sock
    connection.close(timeout=0)
    if transport is not None:
        transport.close()  # the library leaves it open where it is TLS within TLS, whose class is urllib3's


def _receive(connection: Any) -> bytes | None:
    """Return the next message, None at the end of the connection."""
    try:
        operation, data = connection.recv_data()
    except (websocket.WebSocketException, OSError):
        return None
    return None if operation == websocket.ABNF.OPCODE_CLOSE else bytes(data)


def _open(access: Access, target: RequestTarget, pairs: Sequence[tuple[str, str]], protocols: Sequence[str]) -> Any:
    for attempt in (1, 2):
        credentials = access.headers()
        url = f"ws{access.server.removeprefix('http')}{target.path}?{urlencode(pairs, errors='surrogateescape')}"
        try:
            return _connect(access, url, credentials, protocols)
        except websocket.WebSocketBadStatusException as error:
            if error.status_code == 401 and attempt == 1:
                access.renew(credentials)
                continue
            body = error.resp_body or b""
            raise error_from_response(error.status_code, body, "create", target, access.context) from None
        except HTTPError as error:
            raise error_from_connection(error, access.context) from None
        except (websocket.WebSocketException, OSError) as error:
            raise UnreachableError(f"the API server {access.server} cannot be reached: {error}") from None
    raise ApiError(f"the API server {access.server} refuses the connection")


def _connect(access: Access, url: str, headers: urllib3.HTTPHeaderDict, protocols: Sequence[str]) -> Any:
    connection = websocket.create_connection(
        url,
        socket=_transport(access),
        header=[f"{name}: {value}" for name, value in headers.iteritems()],
        subprotocols=list(protocols),
        suppress_origin=True,
        redirect_limit=0,  # another server must not get the credentials
    )
    connection.settimeout(None)
    return connection


def _transport(access: Access) -> Any:
    """Return a new connection to the API server, with the certificates and the proxy that all requests use."""
    server: Any = urllib3.util.parse_url(access.server)
    manager: Any = access.pool
    # The pool's own function knows about client certificates and names of servers.
    connection = manager.connection_from_host(server.host, server.port, server.scheme)._new_conn()
    connection.timeout = _CONNECT
    connection.socket_options = [*(connection.socket_options or []), *_keep_alive()]
    if manager.proxy is not None:
        port = server.port or (443 if server.scheme == "https" else 80)
        connection.set_tunnel(server.host, port, manager.proxy_headers, scheme=manager.proxy.scheme)
    connection.connect()
    return connection.sock


def _keep_alive() -> list[tuple[int, int, int]]:
    """Return the options of a socket whose reader gets an error when the other end is gone without a word."""
    known = [(getattr(socket, name, None), value) for name, value in _KEEP_ALIVE.items()]
    of_tcp = [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *of_tcp]


def _exit_code(status: Any) -> int:
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return foreign.whole(cause.get("message") or 1, 0, 255)
    said = " ".join(str(status.get("message") or status).split())
    # The container runtime says it last, after what each of its layers says.
    if absent := _NO_PROGRAM.search(said):
        raise ApiError(
            f"the command could not be run: {absent[1]}: {absent[2]}",
            hint="words of a shell need one: -- sh -c 'COMMAND'",
        )
    if absent := _NO_CONTAINER.search(said):
        raise ApiError(f"the command could not be run: container {absent[1]} does not run")
    raise ApiError(f"the command could not be run: {said}")
