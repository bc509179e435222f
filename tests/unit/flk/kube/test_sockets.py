"""Commands in containers over WebSockets: their output, exit code and deadline, and how the connection is opened."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from flk.errors import ApiError, ForbiddenError, UnreachableError
from flk.kube import sockets
from flk.kube.kubeconfig import Context
from flk.kube.sockets import STATUS, STDERR, STDOUT, Executed, PodConnection
from flk.observe.client import JobClient
from flk.observe.resources import EXEC, PORT_FORWARD
from tests.support.api_server import failure, write_kubeconfig
from tests.support.certificates import make_certificate

POD = {"metadata": {"name": "train-worker-0"}}
DONE = json.dumps({"status": "Success"}).encode()


class Server:
    """Answers WebSocket requests, one after the other, as a test tells it to."""

    def __init__(self) -> None:
        self.refusals: list[int] = []  # statuses of the next answers
        self.messages: list[bytes] = []
        self.stays_open = False
        self.silent = False  # it answers nothing
        self.echoes = 0  # bytes that it sends back in small messages, each before it reads more
        self.resets = False  # it ends connections without a goodbye
        self.redirect = ""  # the address to which every request is redirected
        self.heads: list[str] = []  # of all requests
        self.proxies = ""  # "http": it is a proxy to itself
        self.tls: ssl.SSLContext | None = None  # with which connections begin
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()
        for connection in self._kept:
            connection.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._server.accept()[0]
                self._kept.append(connection)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if self.silent:
            return
        if self.tls:
            connection = self.tls.wrap_socket(connection, server_side=True)
            self._kept.append(connection)
        head = self._head(connection)
        if self.proxies == "http":
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            head = self._head(connection)
        if self.redirect:
            connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {self.redirect}\r\n\r\n".encode())
            connection.close()
            return
        if self.refusals:
            status = self.refusals.pop(0)
            body = json.dumps(failure(status, 'User "anna" cannot get resource "pods/exec"')).encode()
            connection.sendall(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
            return
        if not (keys := re.findall(r"(?i)sec-websocket-key: (\S+)", head)):
            connection.close()  # a watch of another test that looks for a server that had this port before
            return
        key = keys[0]
        accepted = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        connection.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: " + accepted + b"\r\n\r\n"
        )
        for message in self.messages:
            connection.sendall(b"\x82\x7f" + struct.pack(">Q", len(message)) + message)
        while self.echoes > 0:
            message = on(0, connection.recv(1 << 14))
            connection.sendall(b"\x82\x7f" + struct.pack(">Q", len(message)) + message)
            self.echoes -= len(message) - 1
        if self.resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if not self.stays_open:
            connection.close()

    def _head(self, connection: socket.socket) -> str:
        data = b""
        while not data.endswith(b"\r\n\r\n"):
            data += connection.recv(1)
        self.heads.append(data.decode())
        return self.heads[-1]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def connect(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], JobClient]:
    def client(url: str) -> JobClient:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", url)))
        return JobClient.connect()

    return client


@pytest.fixture
def client(server: Server, connect: Callable[[str], JobClient]) -> JobClient:
    return connect(f"http://{server.address}")


def on(channel: int, data: bytes) -> bytes:
    return bytes([channel]) + data


PORT = struct.pack("<H", 8080)
OF_A_PORT = [on(0, PORT), on(1, PORT), on(0, b"hello")]  # what a server sends, after the port in each channel


def received(client: JobClient) -> bytes:
    """The first bytes of a port of the pod."""
    connection = PodConnection(client.api.access, client.target(PORT_FORWARD, "train-worker-0"), 8080)
    try:
        return connection.receive()
    finally:
        connection.close()


def test_output_and_exit_code_of_a_command(server: Server, client: JobClient) -> None:
    status = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}
    server.messages = [on(STDOUT, b"a"), on(STDERR, b"b"), on(STDOUT, b"c"), on(STATUS, json.dumps(status).encode())]
    assert client.execute(POD, ["true"], 60) == Executed(7, b"ac", b"b")
    assert "container=pytorch&stdin=false&stdout=true&stderr=true&tty=false&command=true" in server.heads[0]


def test_bytes_that_are_no_text_are_sent_as_they_are(server: Server, connect: Callable[[str], JobClient]) -> None:
    server.messages = [on(STATUS, DONE)]
    no_scheme = connect(server.address)  # which means HTTP
    assert no_scheme.execute(POD, ["cat", b"caf\xe9".decode(errors="surrogateescape")], 60).code == 0
    assert "&command=cat&command=caf%E9 " in server.heads[0]


def test_a_refused_token_is_renewed_once(server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[object] = []
    monkeypatch.setattr(client.api.access, "renew", renewed.append)
    server.refusals, server.messages = [401], [on(STATUS, DONE)]
    assert client.execute(POD, ["true"], 60).code == 0
    assert len(renewed) == 1
    server.refusals = [401, 401]
    with pytest.raises(ApiError):
        client.execute(POD, ["true"], 60)
    server.refusals = [403]
    with pytest.raises(ForbiddenError, match="no permission to get pods/exec"):
        client.execute(POD, ["true"], 60)


def test_a_proxy_gets_its_own_credentials(
    server: Server, connect: Callable[[str], JobClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.proxies, server.messages = "http", [on(STATUS, DONE)]
    monkeypatch.setenv("HTTP_PROXY", f"http://anna:secret@{server.address}")
    client = connect("http://api.example.com")
    assert client.execute(POD, ["true"], 60).code == 0
    assert "CONNECT api.example.com:80" in server.heads[0]
    assert base64.b64encode(b"anna:secret").decode() in server.heads[0]
    assert "anna" not in server.heads[1]


def test_the_proxy_is_that_of_other_requests(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the environment is none for this machine; that of a kubeconfig counts whatever $NO_PROXY says."""
    server.messages = [on(STATUS, DONE)]
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    path = write_kubeconfig(tmp_path / "config", f"http://{server.address}")
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert JobClient.connect().execute(POD, ["true"], 60).code == 0
    server.proxies = "http"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    config = json.loads(path.read_text())
    config["clusters"][0]["cluster"]["proxy-url"] = f"http://{server.address}"
    path.write_text(json.dumps(config))
    assert JobClient.connect().execute(POD, ["true"], 60).code == 0
    assert [head.split()[0] for head in server.heads] == ["GET", "CONNECT", "GET"]


def test_a_redirect_gets_no_credentials(server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "is_secure", True)
    other = Server()
    server.redirect = f"ws://{other.address}/"
    with pytest.raises(ApiError):
        client.execute(POD, ["true"], 60)
    other.close()
    assert "Bearer" in server.heads[0]
    assert other.heads == []


def test_impersonation_is_sent(server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = urllib3.HTTPHeaderDict({"Impersonate-User": "ada"})
    headers.add("Impersonate-Group", "a")
    headers.add("Impersonate-Group", "b")
    monkeypatch.setattr(client.api.access, "headers", lambda: headers)
    server.messages = [on(STATUS, DONE)]
    assert client.execute(POD, ["true"], 60).code == 0
    sent = re.findall(r"Impersonate-(\w+: \w+)", server.heads[0])
    assert sent == ["User: ada", "Group: a", "Group: b"]


def test_certificates_are_those_of_the_kubeconfig(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_certificate(tmp_path, "test", alternative="IP:127.0.0.1")
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(made.path, made.key)
    server.messages = [on(STATUS, DONE)]
    path = write_kubeconfig(tmp_path / "config", f"https://{server.address}")
    config = json.loads(path.read_text())
    config["clusters"][0]["cluster"]["certificate-authority-data"] = base64.b64encode(made.path.read_bytes()).decode()
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    client = JobClient.connect()
    assert client.execute(POD, ["true"], 60).code == 0
    server.messages, server.stays_open = OF_A_PORT, True
    assert received(client) == b"hello"
    del config["clusters"][0]["cluster"]["certificate-authority-data"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnreachableError, match="certificate"):
        JobClient.connect().execute(POD, ["true"], 60)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_accepts_and_says_nothing(
    server: Server, connect: Callable[[str], JobClient], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(sockets, "_CONNECT", 0.05)
    server.silent = True
    client = connect(f"{scheme}://{server.address}")
    with pytest.raises(UnreachableError, match=r"does not answer|cannot be reached"):
        client.execute(POD, ["true"], 60)
    with pytest.raises(UnreachableError, match=r"does not answer|cannot be reached"):
        received(client)


def test_the_time_of_a_command_begins_before_it_is_started(
    server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, opened = [0.0], sockets._open

    def slow(*args: Any) -> Any:
        clock[0] += 61
        return opened(*args)

    monkeypatch.setattr(sockets, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(sockets, "_open", slow)
    server.messages = [on(STATUS, DONE)]
    with pytest.raises(UnreachableError, match="did not end within 60 seconds"):
        client.execute(POD, ["true"], 60)


def test_a_port_in_both_directions_at_once(server: Server, client: JobClient) -> None:
    server.messages, server.echoes = OF_A_PORT, 400 * (14 + 1 + (1 << 16))  # each with a head and a channel
    connection = PodConnection(client.api.access, client.target(PORT_FORWARD, "train-worker-0"), 8080)
    sender = threading.Thread(target=lambda: [connection.send(bytes(1 << 16)) for _ in range(400)], daemon=True)
    sender.start()
    size = 0
    while data := connection.receive():
        size += len(data)
    sender.join()
    connection.close()
    assert size == 5 + 400 * (14 + 1 + (1 << 16))


@pytest.mark.parametrize("last", [b"", on(7, b"x")])
def test_a_connection_to_a_port_that_is_reset(
    server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    server.messages, server.resets = [*OF_A_PORT[:2], last], True
    connection = PodConnection(client.api.access, client.target(PORT_FORWARD, "train-worker-0"), 8080)
    while connection.receive():
        pass
    connection.close()
    assert died == []


def test_a_port_on_which_nothing_listens(server: Server, client: JobClient) -> None:
    server.messages, server.stays_open = [*OF_A_PORT[:2], on(1, b"connection refused")], True
    with pytest.raises(UnreachableError, match="connection refused"):
        received(client)


def test_a_command_that_does_not_end(server: Server, client: JobClient) -> None:
    server.messages, server.stays_open = [on(STDOUT, b"working")], True
    with pytest.raises(UnreachableError, match=r"train-worker-0 did not end within 0.05 seconds"):
        client.execute(POD, ["sleep"], 0.05)


def test_a_connection_that_breaks(server: Server, client: JobClient) -> None:
    server.messages = [on(STDOUT, b"half")]
    with pytest.raises(UnreachableError, match="ended before the command did"):
        client.execute(POD, ["cat"], 60)


def test_the_system_looks_whether_the_other_end_of_a_silent_connection_is_gone(
    server: Server, client: JobClient
) -> None:
    where = client.target(EXEC, "train-worker-0")
    remote = sockets.RemoteCommand(client.api.access, where, ["cat"], container="pytorch")
    transport = remote._socket.sock
    assert transport.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle = next(name for name in ("TCP_KEEPIDLE", "TCP_KEEPALIVE") if hasattr(socket, name))
    options = [getattr(socket, name) for name in (idle, "TCP_KEEPINTVL", "TCP_KEEPCNT")]
    silence, interval, probes = (transport.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert silence + interval * probes == 60
    assert transport.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    remote.close()


def test_a_command_that_cannot_start(server: Server, client: JobClient) -> None:
    server.messages = [on(STATUS, json.dumps({"status": "Failure", "message": "no such container"}).encode())]
    with pytest.raises(ApiError, match="could not be run: no such container"):
        client.execute(POD, ["cat"], 60)


@pytest.mark.parametrize("why", ["executable file not found in $PATH", "permission denied"])
def test_a_program_that_the_container_does_not_have_is_named(server: Server, client: JobClient, why: str) -> None:
    # As containerd and runc say it, each in the words of the one below.
    said = (
        "Internal error occurred: error executing command in container: failed to exec in container: failed to start "
        'exec "8455777f": OCI runtime exec failed: exec failed: unable to start container process: '
        f'exec: "tensorbord": {why}: unknown'
    )
    server.messages = [on(STATUS, json.dumps({"status": "Failure", "message": said}).encode())]
    with pytest.raises(ApiError) as error:
        client.execute(POD, ["tensorbord"], 60)
    assert str(error.value) == f"the command could not be run: tensorbord: {why}"
    assert "sh -c" in str(error.value.hint)


def test_a_container_that_has_not_started_is_named(server: Server, client: JobClient) -> None:
    said = 'Internal error occurred: unable to upgrade connection: container not found ("pytorch")'
    server.messages = [on(STATUS, json.dumps({"status": "Failure", "message": said}).encode())]
    with pytest.raises(ApiError, match=r"^the command could not be run: container pytorch does not run$"):
        client.execute(POD, ["true"], 60)


def test_output_without_end(server: Server, client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SIZE_LIMIT", 1 << 20)
    server.messages = [on(STDOUT, bytes(1 << 19))] * 3
    with pytest.raises(UnreachableError, match="wrote more than 1 MiB"):
        client.execute(POD, ["yes"], 60)
