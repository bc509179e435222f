"""Commands in containers (`exec`) and connections to pods (`port-forward`), over the package kubernetes.

That package opens the WebSockets, writes to them, and forwards ports; importing it takes 300 ms, which does not matter
here. It sends no impersonation and knows neither SOCKS proxies nor those spoken to in TLS: flk refuses these, and says
that kubectl can. flk reads the messages of a command itself, since the package gathers all that has come before it
hands on any: the copy of a large file would be in memory, and copied again for each message.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlencode, urlsplit

import websocket
from kubernetes.client import Configuration
from kubernetes.stream.ws_client import PortForward, WSClient, create_websocket

from flk.errors import ApiError, NoConfigError, UnreachableError
from flk.kube.connection import certificate_authority, proxy_of
from flk.kube.credentials import Access
from flk.kube.errors import error_from_response
from flk.kube.kubeconfig import Context
from flk.kube.resources import RequestTarget
from flk_runtime.contract import foreign

STDIN, STDOUT, STDERR, STATUS, RESIZE = 0, 1, 2, 3, 4
_PORT_FORWARD: Final = "v4.channel.k8s.io"
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

    remote = RemoteCommand(access, target, command, container=container, stdin=False)
    try:
        code = remote.run(write, timeout=timeout)
    finally:
        remote.close()
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
        self._target = target
        self._client = _open(access, target, [*pairs, *(("command", word) for word in command)], _command)

    def run(self, write: Callable[[int, bytes], None], *, timeout: float | None = None) -> int:
        """Hand on the output, with STDOUT or STDERR, until the command ends; return its exit code.

        Raises UnreachableError if the connection breaks before, or after ``timeout`` seconds.
        """
        ends = None if timeout is None else time.monotonic() + timeout
        while True:
            if ends is not None:
                self._client.sock.settimeout(max(0.001, ends - time.monotonic()))
            data = _receive(self._client.sock)
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
        self._client.write_channel(STDIN, data)

    def end_input(self) -> None:
        """Close the command's input, where the server can do that (Kubernetes 1.30)."""
        self._client.close_channel(STDIN)

    def resize(self, columns: int, rows: int) -> None:
        """Tell the command's terminal its new size."""
        self._client.write_channel(RESIZE, json.dumps({"Width": columns, "Height": rows}))

    def close(self) -> None:
        """Close the connection."""
        self._client.close(timeout=0)


class PodConnection:
    """A TCP connection to a port of a pod."""

    def __init__(self, access: Access, target: RequestTarget, port: int) -> None:
        """Open the connection. Raises ApiError if the API server refuses it."""
        self._port = port
        self._forward = _open(access, target, [("ports", str(port))], lambda *args: PortForward(_ports(*args), [port]))
        self._socket = self._forward.socket(port)

    def receive(self) -> bytes:
        """Return the next bytes; none at the end. Raises UnreachableError if nothing listens on the port."""
        try:
            data: bytes = self._socket.recv(1 << 16)
        except OSError:
            data = b""  # it was closed
        if not data and (said := self._forward.error(self._port)):
            raise UnreachableError(str(said))
        return data

    def send(self, data: bytes) -> None:
        """Send bytes to the pod."""
        self._socket.sendall(data)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _command(configuration: Any, url: str, headers: dict[str, str]) -> Any:
    return WSClient(configuration, url, headers, capture_all=False, binary=True)


def _ports(configuration: Any, url: str, headers: dict[str, str]) -> Any:
    return create_websocket(configuration, url, {**headers, "sec-websocket-protocol": _PORT_FORWARD})


def _receive(connection: Any) -> bytes | None:
    """Return the next message, None at the end of the connection."""
    try:
        operation, data = connection.recv_data()
    except (websocket.WebSocketException, OSError):
        return None
    return None if operation == websocket.ABNF.OPCODE_CLOSE else bytes(data)


def _open(access: Access, target: RequestTarget, pairs: Sequence[tuple[str, str]], connect: Callable[..., Any]) -> Any:
    """Return what ``connect`` makes of a configuration, an address and headers, with a token that is renewed once."""
    url = f"ws{access.server.removeprefix('http')}{target.path}?{urlencode(pairs)}"
    for attempt in (1, 2):
        credentials = access.headers()
        if any(name.lower() != "authorization" for name in credentials):
            raise _unable(access.context, "impersonates a user")
        headers = {name.lower(): value for name, value in credentials.items()}
        try:
            with _configuration(access) as configuration:
                opened = connect(configuration, url, headers)
            _keep_alive(getattr(opened, "websocket", None) or opened.sock)
            return opened
        except websocket.WebSocketBadStatusException as error:
            if error.status_code == 401 and attempt == 1:
                access.renew(credentials)
                continue
            body = error.resp_body or b""
            raise error_from_response(error.status_code, body, "create", target, access.context) from None
        except (websocket.WebSocketException, OSError) as error:
            raise UnreachableError(f"the API server {access.server} cannot be reached: {error}") from None
    raise ApiError(f"the API server {access.server} refuses the connection")


@contextlib.contextmanager
def _configuration(access: Access) -> Iterator[Configuration]:
    """Yield how to connect to the API server. The package reads certificates from files only: they exist meanwhile."""
    context = access.context
    proxy = proxy_of(context)
    if proxy.partition("://")[0] not in ("", "http"):
        raise _unable(context, f"uses the proxy {proxy.partition('://')[0]}://")
    found = Configuration(host=access.server)
    found.proxy, found.no_proxy = proxy or None, None
    if user := urlsplit(proxy).netloc.rpartition("@")[0]:
        encoded = base64.urlsafe_b64encode(unquote(user).encode()).decode()  # as the package decodes it
        found.proxy_headers = {"proxy-authorization": f"Basic {encoded}"}
    found.verify_ssl = not context.cluster.get("insecure-skip-tls-verify")
    found.tls_server_name = context.cluster.get("tls-server-name") or None
    with tempfile.TemporaryDirectory(prefix="flk-") as folder:  # readable by this user only
        if context.is_secure and (authority := certificate_authority(context)):
            found.ssl_ca_cert = _written(folder, "ca", authority)
        if context.is_secure and (pair := access.certificate()):
            found.cert_file, found.key_file = _written(folder, "cert", pair[0]), _written(folder, "key", pair[1])
        yield found


def _unable(context: Context, what: str) -> NoConfigError:
    return NoConfigError(
        f"context {context.name} {what}, which flk cannot do for exec, cp and port-forward",
        hint="kubectl exec, cp and port-forward can",
    )


def _written(folder: str, name: str, content: bytes) -> str:
    path = Path(folder, name)
    path.write_bytes(content)
    return str(path)


def _keep_alive(connection: Any) -> None:
    """Have the system find that the other end is gone without a word: the reader gets an error then."""
    if connection.sock is None:
        return  # it has ended already
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in _KEEP_ALIVE.items():
        if option := getattr(socket, name, None):
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


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
