"""Hub: the TCP server to which the workers connect. It sends the messages that `Rounds` decides on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from flk_diloco import messages
from flk_diloco.messages import Data, FromHub, Peer
from flk_diloco.rounds import Limits, Member, Rounds
from flk_runtime.contract import foreign
from flk_runtime.contract.foreign import Seconds, Within
from flk_runtime.contract.options import OUTER_DTYPES
from flk_runtime.errors import SetupError
from flk_runtime.system.host import is_loopback
from flk_runtime.wire import LEASE, Acceptor, Refused, listen

_TICK = 0.5  # seconds
_FAREWELL = 60.0  # seconds without workers after which a hub whose launcher has finished ends, if there were any
_Item = tuple[FromHub, Data]
_BYTES, _MORE = 4, 1 << 16  # that a worker may send at once: of an element, and of all beside them


def _check_dtype(name: str) -> None:
    if name not in OUTER_DTYPES:
        raise ValueError(f"expected one of {', '.join(OUTER_DTYPES)}")


@dataclass(frozen=True)
class _Layout:
    """What the hub itself uses of the layout of a worker."""

    workers: Annotated[int, Within(1, 10_000)]
    wait: Seconds
    timeout: Seconds
    size: Annotated[int, Within(0, 2**40)]  # parameters
    dtype: Annotated[str, _check_dtype]


class Hub:
    """Serves workers until `close`. All workers must have the same layout, which the first one sets."""

    def __init__(
        self,
        address: str,
        port: int,
        secret: str,
        *,
        log: Callable[[str], None] = print,
    ) -> None:
        """Listen. ``port`` 0: any free one. Raises OSError, and SetupError for a public address without a secret."""
        if not secret and not is_loopback(address):
            raise SetupError(f"the hub needs a secret to listen on {address or 'all addresses'}")
        self._log = log
        listener = listen(address, port)
        self.port = int(listener.getsockname()[1])
        self._acceptor = Acceptor(
            listener,
            lambda: messages.session(secret, serves=True),
            messages.MESSAGES,
            log,
        )
        self._lock = threading.Lock()
        self._rounds: Rounds | None = None
        self._layout: dict[str, Any] = {}
        self._longest = 0  # bytes that a worker may send at once
        self._peers: dict[int, _Peer] = {}  # by worker
        self._closed = threading.Event()
        self._last_left = time.monotonic()

    def start(self) -> None:
        """Serve in threads of this process."""
        threading.Thread(target=self._acceptor.serve, args=(self._serve, "worker"), daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    def is_done(self, *, launcher_ended: bool, others: bool) -> bool:
        """Whether all workers have come and have said that they have finished, or no further worker is expected.

        Once the launcher has ended, workers are awaited for a minute after the last one has left; if none has come,
        only where there may be ``others``.
        """
        with self._lock:
            if self._peers:
                return False
            if self._rounds and self._rounds.left >= self._layout["workers"]:
                return True
            farewell = _FAREWELL if self._rounds or others else 0.0
            return launcher_ended and time.monotonic() - self._last_left > farewell

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed.set()
        self._acceptor.close()
        with self._lock:
            for peer in self._peers.values():
                peer.stream.close()

    def _serve(self, stream: Peer, address: str) -> None:
        hello, _ = stream.receive()
        if not isinstance(hello, messages.Hello):
            self._acceptor.refuse(address, "it did not introduce itself")
            return
        worker, reason, peer = hello.worker, "", None
        try:
            with self._lock:
                problem = self._problem(hello)
                if not problem:
                    peer = _Peer(stream)
                    self._join(peer, hello)
            if peer is None:
                stream.send(Refused(problem))
                return
            while True:
                message, length = stream.receive()
                if length > self._longest:
                    raise ConnectionError(f"it sent {length} bytes at once")
                data = stream.receive_bytes(length)
                if isinstance(message, messages.Bye):
                    return
                self._handle(worker, peer, message, data)
        except (OSError, *foreign.ERRORS) as error:
            reason = str(error) or type(error).__name__
        finally:
            if peer:
                self._leave(worker, peer, reason)

    def _problem(self, hello: messages.Hello) -> str:
        """Why a worker with this layout cannot train with the others; empty if it can. Call it with the lock.

        Where no worker is left, the first that comes sets the layout anew.
        """
        layout, now = hello.layout, time.monotonic()
        keys = self._layout.keys() - {"wait", "timeout"}
        different = [key for key in self._layout if key in keys and layout.get(key) != self._layout[key]]
        if self._rounds and not different:
            return ""
        if not self._peers:
            try:
                made = foreign.read(_Layout, layout)
                self._rounds = Rounds(
                    Limits(made.workers, made.wait, made.timeout), made.size, made.dtype, now, self._log
                )
            except (RuntimeError, *foreign.ERRORS) as error:
                return f"its layout cannot be used: {error}"
            self._layout, self._longest = layout, 2 * _BYTES * made.size + _MORE  # parameters and momentum
            return ""
        key = different[0]
        if key in ("size", "model"):
            return "its model differs from the model of the other workers"
        return f"its {key} is {layout.get(key)!r}, and {self._layout[key]!r} on the other workers"

    def _join(self, peer: _Peer, hello: messages.Hello) -> None:
        """Add a worker. Call it with the lock."""
        worker = hello.worker
        former = self._peers.get(worker)
        self._peers[worker] = peer
        peer.incarnation = hello.incarnation
        if former and former.incarnation != peer.incarnation:
            reason = f"another process has taken the place of worker {worker}: give each site a number of its own"
            former.post(Refused(reason), b"")
        if former:
            former.close()
        if self._rounds:
            self._rounds.join(Member(worker, peer.post, hello.version, hello.digest), time.monotonic())

    def _handle(self, worker: int, peer: _Peer, message: messages.Message, data: bytearray) -> None:
        with self._lock:
            if self._peers.get(worker) is not peer or not self._rounds:
                raise ConnectionError("another connection of this worker has taken its place")
            match message:
                case messages.Contribution(version):
                    self._rounds.contribute(worker, version, data, time.monotonic())
                case messages.Parameters(version):
                    self._rounds.give(worker, version, data)

    def _leave(self, worker: int, peer: _Peer, reason: str) -> None:
        with self._lock:
            peer.close()
            if self._peers.get(worker) is peer:
                del self._peers[worker]
                self._last_left = time.monotonic()
                if self._rounds and not self._closed.is_set():  # a hub that closes has lost nobody
                    self._rounds.leave(worker, time.monotonic(), reason)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                for worker in self._rounds.tick(time.monotonic()) if self._rounds else ():
                    self._log(f"worker {worker} is late: the others go on without it")
                    self._peers[worker].stream.close()


class _Peer:
    """A connection to a worker, and the thread that sends to it, so that a slow worker holds up no other."""

    def __init__(self, stream: Peer) -> None:
        self.stream = stream
        self.incarnation = ""  # of the worker's process
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        threading.Thread(target=messages.send_queued, args=(stream, self._queue, LEASE), daemon=True).start()

    def post(self, message: FromHub, data: bytes) -> None:
        self._queue.put((message, data))

    def close(self) -> None:
        """Close the connection after all posted messages are sent."""
        self._queue.put(None)
