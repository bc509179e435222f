"""Hub: the TCP server to which the workers connect. It sends the messages that `Rounds` decides on."""

from __future__ import annotations

import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from flk_runtime.diloco import messages
from flk_runtime.diloco.messages import Data, FromHub, Peer
from flk_runtime.diloco.rounds import Limits, Member, Rounds
from flk_runtime.diloco.tls import TlsSocket
from flk_runtime.errors import SetupError
from flk_runtime.wire import LEASE, Lease, Refused, Stream, VersionError, listen, serve

_TICK = 0.5  # seconds
_HANDSHAKE_TIMEOUT = 10.0  # seconds, of TLS
_Item = tuple[FromHub, Data]


class Hub:
    """Serves workers until `close`. All workers must have the same layout, which the first one sets."""

    def __init__(
        self,
        address: str,
        port: int,
        secret: str,
        *,
        tls: ssl.SSLContext | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Listen. ``port`` 0: any free one. Raises OSError, and SetupError for a public address without a secret."""
        if not secret and not _is_loopback(address):
            raise SetupError(f"the hub needs a secret to listen on {address or 'all addresses'}")
        self._secret, self._tls, self._lease, self._log = secret, tls, Lease(LEASE), log
        self._socket = listen(address, port)
        self.port = int(self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._rounds: Rounds | None = None
        self._layout: dict[str, Any] = {}
        self._peers: dict[int, _Peer] = {}  # by worker
        self._closed = threading.Event()
        self.bytes = 0  # sent and received, of connections that have ended
        self._last_left = time.monotonic()

    def start(self) -> None:
        """Serve in threads of this process."""
        threading.Thread(target=serve, args=(self._socket, self._serve, "worker"), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    @property
    def wire_bytes(self) -> int:
        """Bytes that the hub has sent and received over all connections."""
        with self._lock:
            return self.bytes + sum(peer.stream.sent + peer.stream.received for peer in self._peers.values())

    @property
    def idle_for(self) -> float:
        """Seconds since the last worker has left; 0 while there are workers."""
        with self._lock:
            return 0.0 if self._peers else time.monotonic() - self._last_left

    @property
    def met(self) -> bool:
        """Whether a worker has ever connected."""
        with self._lock:
            return self._rounds is not None

    @property
    def finished(self) -> bool:
        """Whether all workers have come, and have said that they have finished."""
        with self._lock:
            return bool(self._rounds) and not self._peers and self._rounds.left >= self._layout["workers"]  # type: ignore[union-attr]

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed.set()
        self._socket.close()
        with self._lock:
            for peer in self._peers.values():
                peer.stream.close()

    def _serve(self, tcp: socket.socket) -> None:
        worker, peer, reason = -1, None, ""
        sock: socket.socket | TlsSocket = tcp
        try:
            tcp.settimeout(_HANDSHAKE_TIMEOUT)
            if self._tls:
                sock = TlsSocket(self._tls.wrap_socket(tcp, server_side=True))
            stream = Stream(sock, messages.session(self._secret, serves=True), messages.MESSAGES, self._lease)
            hello, _ = stream.receive()
            if not isinstance(hello, messages.Hello):
                raise ConnectionError("the worker did not introduce itself")
            worker = hello.worker
            if problem := self._problem(hello.layout):
                stream.send(Refused(problem))
                return
            peer = _Peer(stream, self._lease)
            self._join(peer, hello)
            while True:
                message, length = stream.receive()
                data = stream.receive_bytes(length)
                if isinstance(message, messages.Bye):
                    return
                self._handle(worker, peer, message, data)
        except VersionError as error:
            self._log(f"refused a worker: {error}")
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = str(error) or type(error).__name__
        finally:
            if peer is None:
                sock.close()
            else:
                self._leave(worker, peer, reason)

    def _problem(self, layout: dict[str, Any]) -> str:
        """Why a worker with this layout cannot train with the others; empty if it can."""
        with self._lock:
            if not self._rounds:
                self._layout = layout
                limits = Limits(int(layout["workers"]), float(layout["wait"]), float(layout["timeout"]))
                self._rounds = Rounds(limits, layout["sizes"], layout["dtype"], time.monotonic(), self._log)
            keys = self._layout.keys() - {"wait", "timeout"}
            different = [key for key in self._layout if key in keys and layout.get(key) != self._layout[key]]
        if not different:
            return ""
        key = different[0]
        if key in ("sizes", "model"):
            return "its model differs from the model of the other workers"
        return f"its {key} is {layout.get(key)!r}, and {self._layout[key]!r} on the other workers"

    def _join(self, peer: _Peer, hello: messages.Hello) -> None:
        worker = hello.worker
        with self._lock:
            former = self._peers.get(worker)
            self._peers[worker] = peer
            peer.incarnation = hello.incarnation
            if former and former.incarnation != peer.incarnation:
                reason = f"another process has taken the place of worker {worker}: give each site a number of its own"
                former.post(Refused(reason), b"")
            if former:
                self._forget(former)
            if self._rounds:
                member = Member(worker, peer.post, hello.versions, hello.digest)
                self._rounds.join(member, time.monotonic())

    def _handle(self, worker: int, peer: _Peer, message: messages.Message, data: bytearray) -> None:
        with self._lock:
            if self._peers.get(worker) is not peer or not self._rounds:
                raise ConnectionError("another connection of this worker has taken its place")
            match message:
                case messages.Contribution(fragment, version):
                    self._rounds.contribute(worker, fragment, version, data, time.monotonic())
                case messages.Parameters(versions):
                    self._rounds.give(worker, versions, data)

    def _leave(self, worker: int, peer: _Peer, reason: str) -> None:
        with self._lock:
            self._forget(peer)
            if self._peers.get(worker) is peer:
                del self._peers[worker]
                self._last_left = time.monotonic()
                if self._rounds and not self._closed.is_set():  # a hub that closes has lost nobody
                    self._rounds.leave(worker, time.monotonic(), reason)

    def _forget(self, peer: _Peer) -> None:
        if not peer.forgotten:
            peer.forgotten = True
            self.bytes += peer.stream.sent + peer.stream.received
            peer.close()

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                for worker in self._rounds.tick(time.monotonic()) if self._rounds else ():
                    self._log(f"worker {worker} is late: the others go on without it")
                    self._peers[worker].stream.close()


class _Peer:
    """A connection to a worker, and the thread that sends to it, so that a slow worker holds up no other."""

    def __init__(self, stream: Peer, lease: Lease) -> None:
        self.stream = stream
        self.incarnation = ""  # of the worker's process
        self.forgotten = False
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        threading.Thread(target=messages.send_queued, args=(stream, self._queue, lease), daemon=True).start()

    def post(self, message: FromHub, data: bytes) -> None:
        self._queue.put((message, data))

    def close(self) -> None:
        """Close the connection after all posted messages are sent."""
        self._queue.put(None)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
